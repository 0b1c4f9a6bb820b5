#include "conv.h"

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <new>
#include "pool.h"

namespace ork {
namespace {

int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }

}  // namespace

int64_t ConvCache::block_bytes() const { return layers * KV_BLOCK * padded(width) * (half ? 2 : 4); }

ConvCache::ConvCache(int64_t l, int64_t w, int64_t b, bool f16) : layers(l), width(w), blocks(b), half(f16) {
    bytes_ = (size_t)(block_bytes() * blocks);
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    memory_ = (char*)p;
}

ConvCache::~ConvCache() { munmap(memory_, bytes_); }

// Of a row in one layer.
static int64_t row_bytes(const ConvCache& c) { return padded(c.width) * (c.half ? 2 : 4); }

int64_t ConvCache::cold_bytes(int64_t rows) const {
    const int64_t page = sysconf(_SC_PAGESIZE), row = row_bytes(*this);
    return layers * std::min(KV_BLOCK * row, (rows * row + 2 * page - 1) / page * page);   // a page may begin before them
}

void ConvCache::cool(int64_t block, int64_t rows) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    const int64_t row = row_bytes(*this);
    for (int64_t i = 0; i < layers; i++) {
        const uintptr_t begin = (uintptr_t)memory_ + (i * blocks + block) * KV_BLOCK * row, end = begin + (KV_BLOCK - rows) * row;
        const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;   // whole pages of these rows alone
        if (first < last) madvise((void*)first, last - first, MADV_DONTNEED);
    }
}

ConvLayer ConvCache::layer(int64_t i) const { return {memory_ + i * (block_bytes() / layers) * blocks, half, width, padded(width)}; }

void op_short_conv(const ConvLayer& layer, const Batch& batch, const Mat& bcx, const Mat& taps, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(bcx.rows, layer.width, [&](int64_t b, int64_t e) { k->conv_append(layer, bcx, batch.slots.data(), b, e); });
    for (const Tile& run : batch.runs)   // positions before the run may be of this batch too: all are kept by now
        by_rows(run.count, taps.rows * layer.width, [&](int64_t b, int64_t e) {
            const int32_t* blocks = batch.table.data() + run.seq * batch.table_stride;
            for (int64_t r = b; r < e; r++) {
                int32_t slots[TAPS_MAX];
                for (int64_t t = 0; t < taps.rows; t++) {
                    const int64_t p = run.first_position + r - (taps.rows - 1) + t;
                    slots[t] = p < 0 ? -1 : (int32_t)(blocks[p / KV_BLOCK] * KV_BLOCK + p % KV_BLOCK);
                }
                const int64_t m = run.row + r;
                k->short_conv(layer, bcx.data + m * bcx.stride, taps, slots, out.data + m * out.stride);
            }
        });
}

}  // namespace ork

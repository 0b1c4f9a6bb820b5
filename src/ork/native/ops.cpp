#include "ops.h"

#include <sys/mman.h>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <unordered_map>
#include "pool.h"

namespace ork {

// --- buffers ----------------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t KEEP_BYTES = size_t(256) << 20;   // what the free lists may hold in all
std::mutex free_mutex;
std::unordered_map<size_t, std::vector<char*>>& free_lists() {
    static auto* lists = new std::unordered_map<size_t, std::vector<char*>>;
    return *lists;
}
size_t kept = 0;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

}  // namespace

Buffer::Buffer(size_t bytes) : data_(nullptr), bytes_((bytes + 127) / 64 * 64) {
    {
        std::lock_guard<std::mutex> lock(free_mutex);
        auto& list = free_lists()[bytes_];
        if (!list.empty()) { data_ = list.back(); list.pop_back(); kept -= bytes_; }
    }
    if (!data_ && !(data_ = (char*)std::aligned_alloc(64, bytes_))) throw std::bad_alloc();
}

Buffer::~Buffer() {
    std::lock_guard<std::mutex> lock(free_mutex);
    if (kept + bytes_ > KEEP_BYTES) { std::free(data_); return; }
    free_lists()[bytes_].push_back(data_);
    kept += bytes_;
}

Array::Array(int64_t r, int64_t c) : rows(r), cols(c), stride(round_up(c, 64)), buffer_(sizeof(float) * r * stride) {
    const Mat m = mat();
    if (cols != stride)
        for (int64_t i = 0; i < rows; i++) std::memset(m.data + i * stride + cols, 0, sizeof(float) * (stride - cols));
}

QuantisedRows::QuantisedRows(int64_t m, int64_t k, int64_t g) : M(m), Kp(k), group(g), buffer_(round_up(m * k, 64) + m * groups() * 8 + 64) {
    codes = (int8_t*)buffer_.data();
    scales = (float*)(codes + round_up(m * k, 64));
    sums = (int32_t*)(scales + m * groups());
}

int64_t KvCache::key_bytes() const { return heads * dim * KV_BLOCK * (half ? 2 : 4); }
int64_t KvCache::value_bytes() const { return heads * round_up(dim, 16) * KV_BLOCK * (half ? 2 : 4); }
int64_t KvCache::block_bytes() const { return layers * (key_bytes() + value_bytes()); }

KvCache::KvCache(int64_t l, int64_t h, int64_t d, int64_t b, bool f16) : layers(l), heads(h), dim(d), blocks(b), half(f16) {
    bytes_ = (size_t)(block_bytes() * blocks);
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    memory_ = (char*)p;
}

KvCache::~KvCache() { munmap(memory_, bytes_); }

KvLayer KvCache::layer(int64_t i) const {
    char* keys = memory_ + i * blocks * (key_bytes() + value_bytes());
    return {keys, keys + blocks * key_bytes(), half, heads, dim, round_up(dim, 16)};
}

// --- matrix products --------------------------------------------------------------------------------------------------------

namespace {

// The kernels of quantised codes: one scale a row and int8 codes, or panels of 64 columns for all else.
bool grouped(const Slice& s, const Rows* rows) { return is_quantised(s.codec) && (s.codec != Codec::i8 || rows->group); }

}  // namespace

Blocks column_blocks(const Slice& s, const Rows* rows) {
    if (grouped(s, rows)) return {s.n / GROUP_I4, s.codec == Codec::i8 ? 2 : 1};
    return {s.n / GROUP_I8, s.codec == Codec::f32 ? 4 : s.codec == Codec::f16 ? 2 : 1};
}

void linear_blocks(const Mat& x, const Rows* rows, int64_t m0, int64_t m1, const Slice& s, int64_t g0, int64_t g1, const Mat& out, const float* bias) {
    const Kernels* k = kernels();
    if (grouped(s, rows)) k->linear_grouped(*rows, m0, m1, s, g0, g1, out, bias);
    else if (s.codec == Codec::i8) k->linear_i8(*rows, m0, m1, s, g0, g1, out, bias);
    else if (s.codec == Codec::f16) k->linear_f16(x, m0, m1, s, g0, g1, out, bias);
    else k->linear_f32(x, m0, m1, s, g0, g1, out, bias);
}

void op_linear(const Mat& x, const Rows* rows, const std::vector<LinearJob>& jobs) {
    int64_t shares = 0;
    for (const auto& j : jobs) { const Blocks n = column_blocks(j.slice, rows); shares += n.count * n.shares; }
    auto work = [&](int64_t b, int64_t e, int) {
        for (const auto& j : jobs) {   // the part of [b, e) that falls into each slice; a block belongs to where it begins
            const Blocks n = column_blocks(j.slice, rows);
            const int64_t g0 = b > 0 ? (b + n.shares - 1) / n.shares : 0, last = e > 0 ? (e + n.shares - 1) / n.shares : 0;
            const int64_t g1 = last < n.count ? last : n.count;
            if (g0 < g1) linear_blocks(x, rows, 0, x.rows, j.slice, g0, g1, j.out, j.bias);
            b -= n.count * n.shares;
            e -= n.count * n.shares;
        }
    };
    const int64_t M = x.rows;
    if (M < 8) parallel_runs(shares, work);
    else {
        const int64_t grain = shares / (6 * pool_threads());
        parallel_chunks(shares, grain > 1 ? grain : 1, work);
    }
}

void op_accumulate(const Rows& rows, const Slice& slice, int32_t* out, int64_t stride) {
    const Kernels* k = kernels();
    if (!grouped(slice, &rows)) parallel_runs(slice.n / GROUP_I8, [&](int64_t b, int64_t e, int) { k->accumulate_i8(rows, slice, b, e, out, stride); });
    else parallel_runs(slice.n / GROUP_I4, [&](int64_t b, int64_t e, int) { k->accumulate_grouped(rows, slice, b, e, out, stride); });
}

void op_accumulate_at(const int8_t* a, int64_t pitch, int64_t M, int64_t K, const uint8_t* w, int64_t N, int32_t* out, int64_t out_pitch) {
    QuantisedRows rows(M, K);
    for (int64_t m = 0; m < M; m++) {
        const int8_t* row = a + m * pitch;
        std::memcpy(rows.codes + m * K, row, (size_t)K);
        int32_t sum = 0;
        int8_t least = 0;
        for (int64_t k = 0; k < K; k++) { sum += row[k]; least = row[k] < least ? row[k] : least; }
        rows.sums[m] = sum;
        rows.full_range |= least == -128;
    }
    const Slice slice = {Codec::i8, w, nullptr, nullptr, K, K, 0, (int32_t)N, 0};
    const Rows view = rows.view();
    const Kernels* k = kernels();
    parallel_runs(N / GROUP_I8, [&](int64_t b, int64_t e, int) { k->accumulate_i8(view, slice, b, e, out, out_pitch); });
}

// --- rows -------------------------------------------------------------------------------------------------------------------

void op_quantise(const Mat& x, const Rotation& r, int limit, QuantisedRows& out) {
    const Kernels* k = kernels();
    const RowsOut to = {out.codes, out.scales, out.sums, out.Kp, out.group, limit};
    by_rows(x.rows, (4 + r.m) * x.cols, [&](int64_t b, int64_t e) { k->quantise(x, b, e, r, to); });
}

void op_inflate(Codec codec, const uint8_t* src, int64_t runs, int64_t tiles, int8_t* dst) {
    const Kernels* k = kernels();
    parallel_runs(runs, [&](int64_t b, int64_t e, int) {
        for (int64_t i = b; i < e; i++) k->inflate(codec, src + i * tiles * 1024, tiles, dst + 2 * i * tiles * 1024, dst + (2 * i + 1) * tiles * 1024);
    });
}

void op_rms_norm(const Mat& x, const float* weight, float eps, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(x.rows, x.cols, [&](int64_t b, int64_t e) { k->rms_norm(x, b, e, weight, eps, out); });
}

void op_head_norm(const Mat& x, int64_t dim, const float* weight, float eps) {
    const Kernels* k = kernels();
    by_rows(x.rows, x.cols, [&](int64_t b, int64_t e) { k->head_norm(x, b, e, dim, weight, eps); });
}

void op_rope_table(const Batch& batch, const std::vector<double>& inv_freq, float magnitude, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(out.rows, 8 * out.cols, [&](int64_t b, int64_t e) {
        k->rope_table(batch.positions.data(), b, e, inv_freq.data(), (int64_t)inv_freq.size(), magnitude, out.data, out.stride);
    });
}

void op_rope(const Mat& x, int64_t dim, int64_t rotated, RopePairs pairs, const Mat& table) {
    const Kernels* k = kernels();
    by_rows(x.rows, x.cols, [&](int64_t b, int64_t e) { k->rope(x, b, e, dim, rotated, pairs, table.data, table.stride); });
}

void op_gate(Gate kind, const Mat& g, const Mat& u, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(g.rows, 4 * g.cols, [&](int64_t b, int64_t e) { k->gate(kind, g, u, b, e, out); });
}

void op_add(const Mat& a, const Mat& b, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(a.rows, a.cols, [&](int64_t m0, int64_t m1) { k->add(a, b, m0, m1, out); });
}

void op_scale(const Mat& x, float factor) {
    const Kernels* k = kernels();
    by_rows(x.rows, x.cols, [&](int64_t b, int64_t e) { k->scale(x, b, e, factor); });
}

void op_softcap(const Mat& x, float cap) {
    const Kernels* k = kernels();
    by_rows(x.rows, 8 * x.cols, [&](int64_t b, int64_t e) { k->softcap(x, b, e, cap); });
}

void op_gather(const std::vector<Slice>& slices, const int32_t* ids, int64_t count, int64_t K, const Rotation& r, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(count, 4 * K, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; i++)
            for (const Slice& s : slices) {
                const int64_t column = ids[i] - s.n0;
                if (column < 0 || column >= s.n) continue;
                float* row = out.data + i * out.stride;
                k->gather(s, column, K, r, row);
                break;
            }
    });
}

// --- attention --------------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t TILE_VECTORS = 24;   // query vectors a tile holds: enough to reuse each key, small enough for the caches

std::vector<Tile> tiles_of(const Batch& batch, int64_t share) {
    const int64_t rows = TILE_VECTORS / share > 1 ? TILE_VECTORS / share : 1;
    std::vector<Tile> tiles;
    for (const Tile& run : batch.runs)
        for (int32_t r = 0; r < run.count; r += (int32_t)rows) {
            const int32_t left = run.count - r;
            tiles.push_back({run.row + r, left < rows ? left : (int32_t)rows, run.seq, run.first_position + r});
        }
    return tiles;
}

struct BlockRange { int64_t first, last; };
BlockRange blocks_of(const Tile& t, int64_t window) {
    const int64_t lo = window > 0 && t.first_position - window + 1 > 0 ? t.first_position - window + 1 : 0;
    return {lo / KV_BLOCK, (t.first_position + t.count - 1) / KV_BLOCK};
}

}  // namespace

void op_attention(const KvLayer& kv, const Batch& batch, const Mat& q, const Mat& key, const Mat& value, int64_t heads, float scale, int64_t window, float softcap, const Mat& out) {
    const Kernels* k = kernels();
    const int32_t* slots = batch.slots.data();
    if (key.rows * key.cols <= INLINE_ELEMENTS) k->kv_append(kv, key, value, slots, 0, kv.heads);
    else parallel_chunks(kv.heads, 1, [&](int64_t b, int64_t e, int) { k->kv_append(kv, key, value, slots, b, e); });

    const std::vector<Tile> tiles = tiles_of(batch, heads / kv.heads);
    const AttentionArgs a = {q, out, kv, tiles.data(), batch.table.data(), batch.table_stride, heads, window, scale, softcap};
    const int64_t share = heads / kv.heads, count = (int64_t)tiles.size(), units = count * kv.heads;
    int64_t most_rows = 1, most_blocks = 1;
    for (const Tile& t : tiles) {
        const BlockRange r = blocks_of(t, window);
        if (t.count > most_rows) most_rows = t.count;
        if (r.last - r.first + 1 > most_blocks) most_blocks = r.last - r.first + 1;
    }
    const int64_t vectors = most_rows * share, partial = round_up(2 * vectors + 16, 16) + vectors * kv.dim_pad;
    auto at = [&](float* p) { return Partial{p, p + vectors, p + round_up(2 * vectors + 16, 16)}; };
    const int threads = pool_threads();
    const int64_t scratch = k->attention_scratch(a, most_rows);

    if (threads == 1 || units >= 4 * threads || most_blocks == 1) {   // a thread takes a tile and head through all its blocks
        Buffer memory(sizeof(float) * (size_t)(threads * (scratch + 2 * partial)));
        parallel_chunks(units, 1, [&](int64_t b, int64_t e, int worker) {
            float* mine = (float*)memory.data() + worker * (scratch + 2 * partial);
            for (int64_t u = b; u < e; u++) {
                const Tile& t = tiles[u / kv.heads];
                const int64_t head = u % kv.heads;
                const BlockRange r = blocks_of(t, window);
                const Partial total = at(mine + scratch), one = at(mine + scratch + partial);
                for (int64_t i = r.first; i <= r.last; i++) {
                    k->attention_block(a, t, head, i, mine, i == r.first ? total : one);
                    if (i > r.first) k->attention_merge(a, t, total, one);
                }
                k->attention_finish(a, t, head, total);
            }
        }, threads);
        return;
    }
    // Few tiles, many blocks (decoding a long context): blocks in parallel, then the same merges in the same order.
    Buffer memory(sizeof(float) * (size_t)(threads * scratch + units * most_blocks * partial));
    float* partials = (float*)memory.data() + threads * scratch;
    parallel_chunks(units * most_blocks, 1, [&](int64_t b, int64_t e, int worker) {
        for (int64_t i = b; i < e; i++) {
            const int64_t u = i / most_blocks, j = i % most_blocks;
            const BlockRange r = blocks_of(tiles[u / kv.heads], window);
            if (r.first + j <= r.last)
                k->attention_block(a, tiles[u / kv.heads], u % kv.heads, r.first + j, (float*)memory.data() + worker * scratch, at(partials + i * partial));
        }
    }, threads);
    for (int64_t u = 0; u < units; u++) {
        const Tile& t = tiles[u / kv.heads];
        const BlockRange r = blocks_of(t, window);
        const Partial total = at(partials + u * most_blocks * partial);
        for (int64_t j = 1; j <= r.last - r.first; j++) k->attention_merge(a, t, total, at(partials + (u * most_blocks + j) * partial));
        k->attention_finish(a, t, u % kv.heads, total);
    }
}

// --- the machine's own limits -----------------------------------------------------------------------------------------------

double op_peak(bool integers, int64_t iterations, int64_t* multiply_adds) {
    const Kernels* k = kernels();
    std::atomic<int64_t> done{0};
    const auto start = std::chrono::steady_clock::now();
    parallel_runs(pool_threads(), [&](int64_t b, int64_t e, int) {
        for (int64_t i = b; i < e; i++) done += integers ? k->int8_peak(iterations) : k->float_peak(iterations);
    });
    *multiply_adds = done;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void op_read(const void* p, int64_t bytes) {
    const Kernels* k = kernels();
    std::atomic<int32_t> sum{0};
    parallel_runs(bytes / 4096, [&](int64_t b, int64_t e, int) { sum += k->read_memory((const char*)p + b * 4096, (e - b) * 4096); });
}

}  // namespace ork

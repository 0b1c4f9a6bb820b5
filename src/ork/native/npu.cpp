#include "npu.h"

#include <atomic>
#include <cstring>
#include "pool.h"

namespace ork {

namespace {

constexpr int64_t TILE = 1024;   // bytes, in every precision

// Calls f(first tile in src, its place along K, group, count) for the longest runs of tiles of one group that stay neighbours.
template <class F> void for_runs(int64_t groups, int64_t Kp, int64_t ks, int64_t run, F&& f) {
    const int64_t from = ks / 32, to = run / 32, all = Kp / 32;
    for (int64_t k = 0; k < all;) {
        const int64_t left = from - k % from, room = to - k % to, count = left < room ? left : room;
        for (int64_t g = 0; g < groups; g++)
            f((k / from * groups + g) * from + k % from, k, g, count);
        k += count;
    }
}

}  // namespace

void op_retile(Codec codec, const uint8_t* src, int64_t n, int64_t Kp, int64_t ks, bool inflate, int64_t run, uint8_t* dst) {
    const int64_t groups = n / (codec == Codec::i8 ? GROUP_I8 : GROUP_I4), to = run / 32;
    const Kernels* kernel = kernels();
    for_runs(groups, Kp, ks, run, [&](int64_t at, int64_t k, int64_t g, int64_t count) {
        const uint8_t* tiles = src + at * TILE;
        if (!inflate) {
            std::memcpy(dst + ((k / to * groups + g) * to + k % to) * TILE, tiles, (size_t)(count * TILE));
            return;
        }
        uint8_t* half = dst + ((k / to * 2 * groups + 2 * g) * to + k % to) * TILE;   // 32 of the 64 channels
        kernel->inflate(codec, tiles, count, (int8_t*)half, (int8_t*)half + to * TILE);
    });
}

int op_least_int4(const uint8_t* codes, int64_t bytes) {
    uint8_t low = 15, high = 15;   // of code ^ 8, which orders -8..7 as 0..15
    for (int64_t i = 0; i < bytes; i++) {
        const uint8_t c = codes[i] ^ 0x88, a = c & 15, b = c >> 4;
        low = a < low ? a : low;
        high = b < high ? b : high;
    }
    return (low < high ? low : high) - 8;
}

bool op_pack_int4(const Rows& rows, int64_t ks, int64_t pitch, uint8_t* to) {
    std::atomic<bool> fits{true};
    const int64_t slices = rows.Kp / ks;
    parallel_runs(rows.M, [&](int64_t b, int64_t e, int) {
        uint8_t outside = 0;
        for (int64_t m = b; m < e; m++)
            for (int64_t s = 0; s < slices; s++) {
                const int8_t* a = rows.codes + m * rows.Kp + s * ks;
                uint8_t* t = to + (s * rows.M + m) * pitch;
                for (int64_t i = 0; i < ks / 2; i++) {
                    const uint8_t x = (uint8_t)a[2 * i], y = (uint8_t)a[2 * i + 1];
                    outside |= (uint8_t)(x + 8) | (uint8_t)(y + 8);
                    t[i] = (uint8_t)((x & 15) | y << 4);
                }
                if (pitch > ks / 2) std::memset(t + ks / 2, 0, (size_t)(pitch - ks / 2));
            }
        if (outside & 0xf0) fits = false;
    });
    return fits;
}

void op_scale_partial_sums(const PartialSums& p, int64_t m1, const Rows& rows, const Slice& slice, const Mat& out, const float* bias) {
    const Kernels* k = kernels();
    const int64_t count = m1 - p.m0;
    auto work = [&](int64_t b, int64_t e, int) { k->scale_partial_sums(p, p.m0 + b, p.m0 + e, rows, slice, out, bias); };
    if (count * slice.n * p.count <= 16 * 1024) work(0, count, 0);   // waking others costs more
    else parallel_runs(count, work);
}

}  // namespace ork

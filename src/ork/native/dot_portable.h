// int8 tiles in plain C++.
#pragma once
#include <cstdint>

constexpr int PANEL_ROWS = 1;
constexpr int CORRECTION = 0;

template <int MR> static inline void tile_i8(const int8_t* a, int64_t, const uint8_t* w, int64_t blocks, int32_t (*out)[32], bool) {
    static_assert(MR == 1, "one row at a time");
    for (int64_t b = 0; b < blocks; b++)
        for (int c = 0; c < 32; c++) {
            const int8_t* p = (const int8_t*)w + b * 1024 + c * 32;
            int32_t s = 0;
            for (int k = 0; k < 32; k++) s += (int32_t)p[k] * (int32_t)a[b * 32 + k];
            out[0][c] += s;
        }
}

static int64_t int8_peak(int64_t iterations) {
    alignas(64) int8_t a[32] = {1, 2, 3}, w[1024] = {4, 5, 6};
    int32_t out[1][32] = {};
    for (int64_t k = 0; k < iterations; k++) tile_i8<1>(a, 32, (const uint8_t*)w, 1, out, false);
    volatile int32_t keep = out[0][0];
    (void)keep;
    return iterations * 1024;
}

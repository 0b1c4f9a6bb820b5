// int8 tiles on NEON: sdot where the processor has it (__ARM_FEATURE_DOTPROD), else smull and sadalp; both exact.
#pragma once
#include <arm_neon.h>
#include <cstdint>
#include <utility>

constexpr int PANEL_ROWS = 4;
constexpr int CORRECTION = 0;

static inline int32x4_t dot16(int32x4_t acc, int8x16_t w, int8x16_t a) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(acc, w, a);
#else
    acc = vpadalq_s16(acc, vmull_s8(vget_low_s8(w), vget_low_s8(a)));
    return vpadalq_s16(acc, vmull_high_s8(w, a));
#endif
}

template <int MR, int NC, size_t... J>
static inline void tile_pass(const int8_t* a, int64_t lda, const uint8_t* w, int64_t blocks, int32_t (*out)[32], int column, std::index_sequence<J...>) {
    int32x4_t acc[MR * NC] = {((void)J, vdupq_n_s32(0))...};
    const uint8_t* end = w + blocks * 1024;
    do {
        int8x16_t lo[MR], hi[MR];
        for (int m = 0; m < MR; m++) { lo[m] = vld1q_s8(a + m * lda); hi[m] = vld1q_s8(a + m * lda + 16); }
        int8x16_t u, v;
        (([&] {
             if constexpr (J % MR == 0) { u = vld1q_s8((const int8_t*)w + 32 * (J / MR)); v = vld1q_s8((const int8_t*)w + 32 * (J / MR) + 16); }
             acc[J] = dot16(dot16(acc[J], u, lo[J % MR]), v, hi[J % MR]);
         }()), ...);
        w += 1024;
        a += 32;
    } while (w != end);
    for (int c = 0; c < NC; c += 4)
        for (int m = 0; m < MR; m++) {
            int32x4_t s = vpaddq_s32(vpaddq_s32(acc[c * MR + m], acc[(c + 1) * MR + m]), vpaddq_s32(acc[(c + 2) * MR + m], acc[(c + 3) * MR + m]));
            int32_t* o = out[m] + column + c;
            vst1q_s32(o, vaddq_s32(vld1q_s32(o), s));
        }
}

// One row reads every tile once, front to back, at the memory's speed: four channels' sums are folded into one register.
template <size_t... Q>
static inline void one_row(const int8_t* a, const uint8_t* w, int64_t blocks, int32_t* out, std::index_sequence<Q...>) {
    int32x4_t acc[8] = {vld1q_s32(out + 4 * Q)...};
    for (int64_t b = 0; b < blocks; b++, w += 1024) {
        const int8x16_t lo = vld1q_s8(a + 32 * b), hi = vld1q_s8(a + 32 * b + 16);
        (([&] {
             int32x4_t d[4];
             for (int i = 0; i < 4; i++) {
                 const int8_t* p = (const int8_t*)w + 128 * Q + 32 * i;
                 d[i] = dot16(dot16(vdupq_n_s32(0), vld1q_s8(p), lo), vld1q_s8(p + 16), hi);
             }
             acc[Q] = vaddq_s32(acc[Q], vpaddq_s32(vpaddq_s32(d[0], d[1]), vpaddq_s32(d[2], d[3])));
         }()), ...);
    }
    ((vst1q_s32(out + 4 * Q, acc[Q])), ...);
}

template <int MR> static inline void tile_i8(const int8_t* a, int64_t lda, const uint8_t* w, int64_t blocks, int32_t (*out)[32], bool) {
    constexpr int NC = 4;
    if constexpr (MR == 1) {
        one_row(a, w, blocks, out[0], std::make_index_sequence<8>());
        return;
    }
    for (int c = 0; c < 32; c += NC) tile_pass<MR, NC>(a, lda, w + 32 * c, blocks, out, c, std::make_index_sequence<MR * NC>());
}

static int64_t int8_peak(int64_t iterations) {
    int8x16_t u = vdupq_n_s8(3), s = vdupq_n_s8(5);
    int32x4_t a[8];
    for (auto& x : a) x = vdupq_n_s32(0);
    for (int64_t k = 0; k < iterations; k++) {
#pragma GCC unroll 8
        for (auto& x : a) {
            asm volatile("" : "+w"(u), "+w"(s));   // or one product would serve all
            x = dot16(x, u, s);
        }
    }
    for (auto& x : a) asm volatile("" : : "w"(x));
    return iterations * 8 * 16;
}

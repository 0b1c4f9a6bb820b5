// int8 tiles on AVX2: 32 codes a register. With AVX-VNNI one vpdpbusd on u8 = w ^ 0x80; without it vpmaddubsw of |w| and
// a signed like w, which is exact for codes down to -127, and a widening product for rows that hold a -128.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include <utility>

#ifdef __AVXVNNI__
constexpr int CORRECTION = 128;
#else
constexpr int CORRECTION = 0;
#endif
constexpr int PANEL_ROWS = 3;

static inline __m256i dot32(__m256i acc, __m256i w, __m256i a) {
#ifdef __AVXVNNI__
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a));   // the intrinsic costs gcc 12 two moves
    return acc;
#else
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(a, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
static inline __m256i dot32_full_range(__m256i acc, __m256i w, __m256i a) {
    __m256i lo = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(w)), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(a)));
    __m256i hi = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(w, 1)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(a, 1)));
    return _mm256_add_epi32(acc, _mm256_add_epi32(lo, hi));
}
static inline __m128i reduce_four(__m256i a, __m256i b, __m256i c, __m256i d) {
    __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

template <int MR, int NC, bool FULL, size_t... J>
static inline void tile_pass(const int8_t* a, int64_t lda, const uint8_t* w, int64_t blocks, int32_t (*out)[32], int column, std::index_sequence<J...>) {
    __m256i acc[MR * NC] = {((void)J, _mm256_setzero_si256())...};
    const uint8_t* end = w + blocks * 1024;
    do {
        __m256i x[MR];
        x[0] = _mm256_loadu_si256((const __m256i*)a);
        if constexpr (MR > 1) x[1] = _mm256_loadu_si256((const __m256i*)(a + lda));
        if constexpr (MR > 2) x[2] = _mm256_loadu_si256((const __m256i*)(a + 2 * lda));
        __m256i u;
        (([&] {
             if constexpr (J % MR == 0) {
                 u = _mm256_loadu_si256((const __m256i*)(w + 32 * (J / MR)));
                 if constexpr (CORRECTION != 0) u = _mm256_xor_si256(u, _mm256_set1_epi8((char)0x80));
             }
             if constexpr (FULL && CORRECTION == 0) acc[J] = dot32_full_range(acc[J], u, x[J % MR]);
             else acc[J] = dot32(acc[J], u, x[J % MR]);
         }()), ...);
        w += 1024;
        a += 32;
    } while (w != end);
    for (int c = 0; c < NC; c += 4)
        for (int m = 0; m < MR; m++) {
            __m128i* o = (__m128i*)(out[m] + column + c);
            __m128i s = reduce_four(acc[c * MR + m], acc[(c + 1) * MR + m], acc[(c + 2) * MR + m], acc[(c + 3) * MR + m]);
            _mm_storeu_si128(o, _mm_add_epi32(_mm_loadu_si128(o), s));
        }
}

// One row reads every tile once, front to back, at the memory's speed: four channels' sums are folded into one register.
template <bool FULL, size_t... Q>
static inline void one_row(const int8_t* a, const uint8_t* w, int64_t blocks, int32_t* out, std::index_sequence<Q...>) {
    __m256i acc[8] = {((void)Q, _mm256_setzero_si256())...};
    for (int64_t b = 0; b < blocks; b++, w += 1024) {
        const __m256i x = _mm256_loadu_si256((const __m256i*)(a + 32 * b));
        (([&] {
             __m256i d[4];
             for (int i = 0; i < 4; i++) {
                 __m256i u = _mm256_loadu_si256((const __m256i*)(w + 128 * Q + 32 * i));
                 if constexpr (CORRECTION != 0) u = _mm256_xor_si256(u, _mm256_set1_epi8((char)0x80));
                 if constexpr (FULL && CORRECTION == 0) d[i] = dot32_full_range(_mm256_setzero_si256(), u, x);
                 else d[i] = dot32(_mm256_setzero_si256(), u, x);
             }
             acc[Q] = _mm256_add_epi32(acc[Q], _mm256_hadd_epi32(_mm256_hadd_epi32(d[0], d[1]), _mm256_hadd_epi32(d[2], d[3])));
         }()), ...);
    }
    (([&] {
         __m128i* o = (__m128i*)(out + 4 * Q);
         const __m128i s = _mm_add_epi32(_mm256_castsi256_si128(acc[Q]), _mm256_extracti128_si256(acc[Q], 1));
         _mm_storeu_si128(o, _mm_add_epi32(_mm_loadu_si128(o), s));
     }()), ...);
}

template <int MR> static inline void tile_i8(const int8_t* a, int64_t lda, const uint8_t* w, int64_t blocks, int32_t (*out)[32], bool full_range) {
    constexpr int NC = 4;
    if constexpr (MR == 1) {
        if (full_range) one_row<true>(a, w, blocks, out[0], std::make_index_sequence<8>());
        else one_row<false>(a, w, blocks, out[0], std::make_index_sequence<8>());
        return;
    }
    for (int c = 0; c < 32; c += NC) {
        if (full_range) tile_pass<MR, NC, true>(a, lda, w + 32 * c, blocks, out, c, std::make_index_sequence<MR * NC>());
        else tile_pass<MR, NC, false>(a, lda, w + 32 * c, blocks, out, c, std::make_index_sequence<MR * NC>());
    }
}

static int64_t int8_peak(int64_t iterations) {
    __m256i u = _mm256_set1_epi8(3), s = _mm256_set1_epi8(5), a[8];
    for (auto& x : a) x = _mm256_setzero_si256();
    for (int64_t k = 0; k < iterations; k++) {
#pragma GCC unroll 8
        for (auto& x : a) {
            asm volatile("" : "+x"(u), "+x"(s));   // or one product would serve all
            x = dot32(x, u, s);
        }
    }
    for (auto& x : a) asm volatile("" : : "x"(x));
    return iterations * 8 * 32;
}

// int8 tiles on AVX-512 VNNI: a 64-byte load holds two channels of 32 codes; weights become u8 by ^ 0x80.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include <utility>

constexpr int PANEL_ROWS = 6;
constexpr int CORRECTION = 128;  // sums come out too large by this times the row's code sum

// Four accumulators (eight channels of eight partial sums) to eight sums.
static inline __m256i reduce_eight(__m512i a0, __m512i a1, __m512i a2, __m512i a3) {
    __m512i s0 = _mm512_add_epi32(_mm512_unpacklo_epi32(a0, a1), _mm512_unpackhi_epi32(a0, a1));
    __m512i s1 = _mm512_add_epi32(_mm512_unpacklo_epi32(a2, a3), _mm512_unpackhi_epi32(a2, a3));
    __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(s0, s1), _mm512_unpackhi_epi64(s0, s1));
    __m256i lo = _mm512_castsi512_si256(s), hi = _mm512_extracti64x4_epi64(s, 1);  // even channels, odd channels
    __m128i even = _mm_add_epi32(_mm256_castsi256_si128(lo), _mm256_extracti128_si256(lo, 1));
    __m128i odd = _mm_add_epi32(_mm256_castsi256_si128(hi), _mm256_extracti128_si256(hi, 1));
    return _mm256_set_m128i(_mm_unpackhi_epi32(even, odd), _mm_unpacklo_epi32(even, odd));
}

// Accumulators must be scalars to the compiler from the start, or gcc spills them: hence index sequences, not loops.
template <int MR, int NZ, size_t... J>
static inline void tile_pass(const int8_t* a, int64_t lda, const uint8_t* w, int64_t blocks, int32_t (*out)[32], int column, std::index_sequence<J...>) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    __m512i acc[MR * NZ] = {((void)J, _mm512_setzero_si512())...};
    const uint8_t* end = w + blocks * 1024;
    do {
        __m512i x[MR];
        if constexpr (MR > 0) x[0] = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)a));
        if constexpr (MR > 1) x[1] = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(a + lda)));
        if constexpr (MR > 2) x[2] = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(a + 2 * lda)));
        if constexpr (MR > 3) x[3] = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(a + 3 * lda)));
        if constexpr (MR > 4) x[4] = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(a + 4 * lda)));
        if constexpr (MR > 5) x[5] = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(a + 5 * lda)));
        __m512i u;
        (([&] {
             if constexpr (J % MR == 0) u = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * (J / MR)), flip);
             asm("vpdpbusd %2, %1, %0" : "+v"(acc[J]) : "v"(u), "v"(x[J % MR]));
         }()), ...);
        w += 1024;
        a += 32;
    } while (w != end);
    for (int z = 0; z < NZ; z += 4)
        for (int m = 0; m < MR; m++) {
            __m256i* o = (__m256i*)(out[m] + column + 2 * z);
            __m256i s = reduce_eight(acc[z * MR + m], acc[(z + 1) * MR + m], acc[(z + 2) * MR + m], acc[(z + 3) * MR + m]);
            _mm256_storeu_si256(o, _mm256_add_epi32(_mm256_loadu_si256(o), s));
        }
}

// out[m][0..32) += sums over `blocks` tiles of 32 codes for MR rows.
template <int MR> static inline void tile_i8(const int8_t* a, int64_t lda, const uint8_t* w, int64_t blocks, int32_t (*out)[32], bool) {
    constexpr int NZ = MR == 1 ? 16 : MR <= 3 ? 8 : 4;
    for (int z = 0; z < 16; z += NZ) tile_pass<MR, NZ>(a, lda, w + 64 * z, blocks, out, 2 * z, std::make_index_sequence<MR * NZ>());
}

static int64_t int8_peak(int64_t iterations) {
    const __m512i u = _mm512_set1_epi8(3), s = _mm512_set1_epi8(5);
    __m512i a[12];
    for (auto& x : a) x = _mm512_setzero_si512();
    for (int64_t k = 0; k < iterations; k++) {
#define STEP(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(a[i]) : "v"(u), "v"(s));
        STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)
#undef STEP
    }
    return iterations * 12 * 64;
}

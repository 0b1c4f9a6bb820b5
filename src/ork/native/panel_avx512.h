// 4-bit tiles and panels on AVX-512 VNNI; meanings as in panel_portable.h. Weights are u8 = code or level + 128.
#pragma once
#include <immintrin.h>
#include <cstdint>

constexpr int PANEL_MR = 3, ROWS_IN_PLACE = 4, ROWS_AT_ONCE = 4;
constexpr bool SPLIT_PANELS = false;
constexpr int panel_nc(int) { return 4; }   // 12 sums, as many floats, 4 weights: 7 loads for 12 products
constexpr int STEP_CODES = 4, ACT_STEPS = 1, CODE_BYTES = 1;

using Levels = __m512i;   // the same 16 bytes in every 128-bit lane
static inline Levels levels_signed(const int8_t* table) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)); }
static inline Levels levels_of(const int8_t* table) { return _mm512_xor_si512(levels_signed(table), _mm512_set1_epi8((char)0x80)); }

static inline __m512i dot64(__m512i acc, __m512i u, __m512i s) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
    return acc;
}

// 32 bytes of nibbles to the 64 levels in order: two channels of a tile.
static inline __m512i expand(const uint8_t* p, Levels levels) {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i nibbles = _mm512_ternarylogic_epi32(x, _mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x0f0f), 0xA8);   // (a | b) & c
    return _mm512_shuffle_epi8(levels, nibbles);
}

static inline void split_row(const int8_t* a, int64_t n, int8_t* out) {
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int64_t k = 0; k < n; k += 32) {
        const __m256i x = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)(a + k)), order);
        _mm256_storeu_si256((__m256i*)(out + k), _mm256_permute4x64_epi64(x, 0xD8));
    }
}

constexpr int AHEAD = 256;   // inputs: a tile of 32 takes as long as a fifth of a memory access, and two fit the reorder buffer

// Sixteen channels: partial sums of four in a register, added across.
static inline __m512i quarter(__m512i sum, const uint8_t* w, const uint8_t* next, Levels levels, __m512i even, __m512i odd) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i c[4];
#define PART(i) { const __m512i v = _mm512_loadu_si512(w + 64 * i); __builtin_prefetch(next + 64 * i); \
        c[i] = dot64(_mm512_setzero_si512(), _mm512_shuffle_epi8(levels, _mm512_and_si512(v, low)), even); \
        c[i] = dot64(c[i], _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(v, 4), low)), odd); }
    PART(0) PART(1) PART(2) PART(3)
#undef PART
    const __m512i p = _mm512_add_epi32(_mm512_unpacklo_epi32(c[0], c[1]), _mm512_unpackhi_epi32(c[0], c[1]));
    const __m512i q = _mm512_add_epi32(_mm512_unpacklo_epi32(c[2], c[3]), _mm512_unpackhi_epi32(c[2], c[3]));
    return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_unpacklo_epi64(p, q), _mm512_unpackhi_epi64(p, q)));
}

static inline __attribute__((always_inline)) void one_row(const uint8_t* w, int64_t tiles, const int8_t* a, Levels levels, const uint8_t* next, I16* sums) {
    __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0;   // channel 4 * i + lane at 4 * lane + i
    for (int64_t t = 0; t < tiles; t++, w += 1024, next += 1024, a += 32) {
        const __m512i even = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)a));
        const __m512i odd = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(a + 16)));
        s0 = quarter(s0, w, next, levels, even, odd);
        s1 = quarter(s1, w + 256, next + 256, levels, even, odd);
        s2 = quarter(s2, w + 512, next + 512, levels, even, odd);
        s3 = quarter(s3, w + 768, next + 768, levels, even, odd);
    }
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    sums[0] = _mm512_add_epi32(sums[0], _mm512_permutexvar_epi32(order, s0));
    sums[1] = _mm512_add_epi32(sums[1], _mm512_permutexvar_epi32(order, s1));
    sums[2] = _mm512_add_epi32(sums[2], _mm512_permutexvar_epi32(order, s2));
    sums[3] = _mm512_add_epi32(sums[3], _mm512_permutexvar_epi32(order, s3));
}

// Sixteen int8 channels: partial sums of two in a register, added across.
static inline __m512i half_i8(__m512i sum, const uint8_t* w, const uint8_t* next, __m512i a) {
    const __m512i flip = _mm512_set1_epi8((char)0x80), order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m512i v[8], p[4], q[2];
#define PART(i) v[i] = dot64(_mm512_setzero_si512(), _mm512_xor_si512(_mm512_loadu_si512(w + 64 * i), flip), a); __builtin_prefetch(next + 64 * i);
    PART(0) PART(1) PART(2) PART(3) PART(4) PART(5) PART(6) PART(7)
#undef PART
#define ADD(r, bits, a, b) r = _mm512_add_epi32(_mm512_unpacklo_epi##bits(a, b), _mm512_unpackhi_epi##bits(a, b));
    ADD(p[0], 32, v[0], v[1]) ADD(p[1], 32, v[2], v[3]) ADD(p[2], 32, v[4], v[5]) ADD(p[3], 32, v[6], v[7])
    ADD(q[0], 64, p[0], p[1]) ADD(q[1], 64, p[2], p[3])
#undef ADD
    const __m512i s = _mm512_add_epi32(_mm512_shuffle_i32x4(q[0], q[1], 0x88), _mm512_shuffle_i32x4(q[0], q[1], 0xDD));
    return _mm512_add_epi32(sum, _mm512_permutexvar_epi32(order, s));
}

static inline __attribute__((always_inline)) void one_row_i8(const uint8_t* w, int64_t tiles, const int8_t* a, const uint8_t* next, I16* sums) {
    for (int64_t t = 0; t < tiles; t++, w += 1024, next += 1024, a += 32) {
        const __m512i x = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)a));
        sums[0] = half_i8(sums[0], w, next, x);
        sums[1] = half_i8(sums[1], w + 512, next + 512, x);
    }
}

// Four registers of four channels by four steps -> four steps of sixteen channels.
static inline void transpose4(__m512i q0, __m512i q1, __m512i q2, __m512i q3, __m512i (&out)[4]) {
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29), second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    const __m512i a = _mm512_permutex2var_epi32(q0, first, q1), b = _mm512_permutex2var_epi32(q2, first, q3);
    const __m512i c = _mm512_permutex2var_epi32(q0, second, q1), d = _mm512_permutex2var_epi32(q2, second, q3);
    out[0] = _mm512_shuffle_i64x2(a, b, 0x44);
    out[1] = _mm512_shuffle_i64x2(a, b, 0xEE);
    out[2] = _mm512_shuffle_i64x2(c, d, 0x44);
    out[3] = _mm512_shuffle_i64x2(c, d, 0xEE);
}

// Sixteen channels of a tile, eight steps: of int8 codes in order, of 4-bit ones even codes, then odd ones, as split_row.
static inline void steps_i8(const uint8_t* tile, __m512i (&out)[8]) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    __m512i lo[4], hi[4], first[4], second[4];
#define FOUR(i) { const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(tile + 128 * i), flip), b = _mm512_xor_si512(_mm512_loadu_si512(tile + 128 * i + 64), flip); \
        lo[i] = _mm512_shuffle_i32x4(a, b, 0x88); hi[i] = _mm512_shuffle_i32x4(a, b, 0xDD); }
    FOUR(0) FOUR(1) FOUR(2) FOUR(3)
#undef FOUR
    transpose4(lo[0], lo[1], lo[2], lo[3], first);
    transpose4(hi[0], hi[1], hi[2], hi[3], second);
    for (int i = 0; i < 4; i++) {
        out[i] = first[i];
        out[4 + i] = second[i];
    }
}
static inline void steps_4bit(const uint8_t* tile, Levels levels, __m512i (&out)[8]) {   // eight codes of a channel move together, then come apart
    const __m512i low = _mm512_set1_epi8(15);
    __m512i q[4];
    transpose4(_mm512_loadu_si512(tile), _mm512_loadu_si512(tile + 64), _mm512_loadu_si512(tile + 128), _mm512_loadu_si512(tile + 192), q);
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_shuffle_epi8(levels, _mm512_and_si512(q[i], low));
        out[4 + i] = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(q[i], 4), low));
    }
}

static inline void unpack_4bit(const uint8_t* tile, Levels levels, uint8_t* panel) {
    for (int c = 0; c < 4; c++, tile += 256, panel += 64) {
        __m512i w[8];
        steps_4bit(tile, levels, w);
        for (int i = 0; i < 4; i++) {   // into the codes' own order
            const __m512 a = _mm512_castsi512_ps(_mm512_unpacklo_epi8(w[i], w[4 + i])), b = _mm512_castsi512_ps(_mm512_unpackhi_epi8(w[i], w[4 + i]));
            _mm512_store_ps(panel + 512 * i, _mm512_shuffle_ps(a, b, 0x88));
            _mm512_store_ps(panel + 512 * i + 256, _mm512_shuffle_ps(a, b, 0xDD));
        }
    }
}
static inline void unpack_i8(const uint8_t* tile, uint8_t* panel) {
    for (int c = 0; c < 2; c++) {
        __m512i w[8];
        steps_i8(tile + 512 * c, w);
        for (int i = 0; i < 8; i++) _mm512_store_si512(panel + 256 * i + 64 * c, w[i]);
    }
}

using W16 = __m512i;
using Act = __m512i;
static inline W16 load_weights(const uint8_t* p) {
    W16 w = _mm512_load_si512(p);
    asm("" : "+v"(w));   // or gcc loads it again for every row
    return w;
}
static inline Act load_act(const int8_t* a) { int32_t x; __builtin_memcpy(&x, a, 4); return _mm512_set1_epi32(x); }
template <int> static inline I16 dot_step(I16 acc, W16 w, Act a) { return dot64(acc, w, a); }

// Sums of a few rows: what a panel would hold of 32 channels stays in registers, for all of them. C sixteens of channels in a
// tile: 4 of 4-bit codes, 2 of int8. Not inlined, or gcc runs out of registers among what its caller keeps in them.
template <int R, int C> static __attribute__((noinline)) void several_rows(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t lda, Levels levels, const uint8_t* next, I16* sums) {
    constexpr int size = 1024 / C;
    for (int64_t t = 0; t < tiles; t++, a += 32)
        for (int c = 0; c < C; c += 2, w += 2 * size, next += 2 * size) {
            __m512i u[8], v[8];
            for (int h = 0; h < 2; h++) {
                if constexpr (C == 4) steps_4bit(w + h * size, levels, h ? v : u);
                else steps_i8(w + h * size, h ? v : u);
            }
            for (int i = 0; i < 2 * size; i += 64) __builtin_prefetch(next + i);
            for (int r = 0; r < R; r++) {   // two sums for one, because each waits for its last product
                I16 p = sums[r * C + c], q = sums[r * C + c + 1], p2 = _mm512_setzero_si512(), q2 = p2;
                for (int i = 0; i < 4; i++) {
                    const __m512i x = load_act(a + r * lda + 4 * i), y = load_act(a + r * lda + 16 + 4 * i);
                    p = dot64(p, u[i], x);
                    q = dot64(q, v[i], x);
                    p2 = dot64(p2, u[4 + i], y);
                    q2 = dot64(q2, v[4 + i], y);
                }
                sums[r * C + c] = _mm512_add_epi32(p, p2);
                sums[r * C + c + 1] = _mm512_add_epi32(q, q2);
            }
        }
}

template <int R> static inline __attribute__((always_inline)) void row_sums(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t lda, Levels levels, const uint8_t* next, I16* sums) {
    if constexpr (R == 1) one_row(w, tiles, a, levels, next, sums);
    else several_rows<R, 4>(w, tiles, a, lda, levels, next, sums);
}
template <int R> static inline __attribute__((always_inline)) void row_sums_i8(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t lda, bool, const uint8_t* next, I16* sums) {
    if constexpr (R == 1) one_row_i8(w, tiles, a, next, sums);
    else several_rows<R, 2>(w, tiles, a, lda, Levels(), next, sums);
}

static inline void inflate_tile(const uint8_t* p, Levels signed_levels, int8_t* first, int8_t* second) {
    for (int i = 0; i < 16; i++) {
        _mm512_storeu_si512(first + 64 * i, expand(p + 32 * i, signed_levels));
        _mm512_storeu_si512(second + 64 * i, expand(p + 512 + 32 * i, signed_levels));
    }
}

// 4-bit tiles and panels on AVX2; meanings as in panel_portable.h. With AVX-VNNI weights are u8 = code or level + 128.
// Without it panels hold int16, so that vpmaddwd is exact for all codes, and a row in place takes vpmaddubsw of |a| and a
// level signed like a, which is exact because no level is -128.
#pragma once
#include <immintrin.h>
#include <cstdint>

using Levels = __m256i;
constexpr bool SPLIT_PANELS = true;
static inline Levels levels_signed(const int8_t* table) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)); }

#ifdef __AVXVNNI__
constexpr int PANEL_MR = 3, ROWS_IN_PLACE = 2, ROWS_AT_ONCE = 1;
constexpr int panel_nc(int) { return 2; }
constexpr int STEP_CODES = 4, ACT_STEPS = 1, CODE_BYTES = 1;
static inline Levels levels_of(const int8_t* table) { return _mm256_xor_si256(levels_signed(table), _mm256_set1_epi8((char)0x80)); }
static inline __m256i dot_levels(__m256i acc, __m256i w, __m256i a, __m256i) { return dot32(acc, w, a); }
#else
constexpr int PANEL_MR = 4, ROWS_IN_PLACE = 10, ROWS_AT_ONCE = 1;
constexpr int panel_nc(int) { return 1; }
constexpr int STEP_CODES = 2, ACT_STEPS = 4, CODE_BYTES = 2;
static inline Levels levels_of(const int8_t* table) { return levels_signed(table); }
static inline __m256i dot_levels(__m256i acc, __m256i w, __m256i a, __m256i size) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(w, a)), _mm256_set1_epi16(1)));
}
#endif

// 16 bytes of nibbles to the 32 levels in order: one channel of a tile.
static inline __m256i expand(const uint8_t* p, Levels levels) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 4)), _mm256_set1_epi16(0x0f0f)));
}

// The same in the order of split_row: the even ones, then the odd ones.
static inline __m256i expand_split(const uint8_t* p, Levels levels) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15)));
}

static inline void split_row(const int8_t* a, int64_t n, int8_t* out) {
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int64_t k = 0; k < n; k += 32) {
        const __m256i x = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)(a + k)), order);
        _mm256_storeu_si256((__m256i*)(out + k), _mm256_permute4x64_epi64(x, 0xD8));
    }
}

constexpr int AHEAD = 256;   // inputs, as on AVX-512

// Eight channels: partial sums of two in a register, added across.
static inline __m256i eighth(const uint8_t* w, const uint8_t* next, Levels levels, __m256i even, __m256i odd, __m256i even_size, __m256i odd_size) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i c[4];
#define PART(i) { const __m256i v = _mm256_loadu_si256((const __m256i*)(w + 32 * i)); if (i % 2 == 0) __builtin_prefetch(next + 32 * i); \
        c[i] = dot_levels(_mm256_setzero_si256(), _mm256_shuffle_epi8(levels, _mm256_and_si256(v, low)), even, even_size); \
        c[i] = dot_levels(c[i], _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_srli_epi16(v, 4), low)), odd, odd_size); }
    PART(0) PART(1) PART(2) PART(3)
#undef PART
    return _mm256_hadd_epi32(_mm256_hadd_epi32(c[0], c[1]), _mm256_hadd_epi32(c[2], c[3]));
}

template <int R> static inline void row_sums(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t, Levels levels, const uint8_t* next, I16* sums) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t t = 0; t < tiles; t++, w += 1024, next += 1024, a += 32) {
        const __m256i even = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)a)), even_size = _mm256_abs_epi8(even);
        const __m256i odd = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(a + 16))), odd_size = _mm256_abs_epi8(odd);
        auto add = [&](__m256i& sum, int at) {
            sum = _mm256_add_epi32(sum, _mm256_permutevar8x32_epi32(eighth(w + at, next + at, levels, even, odd, even_size, odd_size), order));
        };
        add(sums[0].a, 0);   add(sums[0].b, 128); add(sums[1].a, 256); add(sums[1].b, 384);
        add(sums[2].a, 512); add(sums[2].b, 640); add(sums[3].a, 768); add(sums[3].b, 896);
    }
}

// The same of one int8 tile column: 32 channels.
template <int R> static inline void row_sums_i8(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t, bool full_range, const uint8_t*, I16* sums) {
    tile_i8<1>(a, 0, w, tiles, (int32_t (*)[32])sums, full_range);
}

template <class Channel> static inline void transpose8(Channel&& channel, uint8_t* out) {   // channel(i): eight steps of one channel
    __m256i t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        const __m256i a = channel(i), b = channel(i + 1);
        t[i] = _mm256_unpacklo_epi32(a, b);
        t[i + 1] = _mm256_unpackhi_epi32(a, b);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_store_si256((__m256i*)(out + 256 * i), _mm256_permute2x128_si256(u[i], u[i + 4], 0x20));
        _mm256_store_si256((__m256i*)(out + 256 * (i + 4)), _mm256_permute2x128_si256(u[i], u[i + 4], 0x31));
    }
}

template <class Channel> static inline void unpack8(Channel&& channel, uint8_t* panel) {
#ifdef __AVXVNNI__
    transpose8(channel, panel);
#else
    transpose8([&](int i) { return _mm256_cvtepi8_epi16(_mm256_castsi256_si128(channel(i))); }, panel);
    transpose8([&](int i) { return _mm256_cvtepi8_epi16(_mm256_extracti128_si256(channel(i), 1)); }, panel + 2048);
#endif
}

static inline void unpack_4bit(const uint8_t* tile, Levels levels, uint8_t* panel) {
    for (int c = 0; c < 64; c += 8) unpack8([&](int i) { return expand_split(tile + 16 * (c + i), levels); }, panel + 4 * c);
}
static inline void unpack_i8(const uint8_t* tile, uint8_t* panel) {
    for (int c = 0; c < 32; c += 8)
        unpack8([&](int i) {
            const __m256i x = _mm256_loadu_si256((const __m256i*)(tile + 32 * (c + i)));
            return CORRECTION ? _mm256_xor_si256(x, _mm256_set1_epi8((char)0x80)) : x;
        }, panel + 4 * c);
}

struct W16 { __m256i a, b; };
using Act = __m256i;
static inline W16 load_weights(const uint8_t* p) { return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 32))}; }
#ifdef __AVXVNNI__
static inline Act load_act(const int8_t* a) { int32_t x; __builtin_memcpy(&x, a, 4); return _mm256_set1_epi32(x); }
template <int> static inline I16 dot_step(I16 acc, W16 w, Act a) { return {dot32(acc.a, w.a, a), dot32(acc.b, w.b, a)}; }
#else
static inline Act load_act(const int8_t* a) { int64_t x; __builtin_memcpy(&x, a, 8); return _mm256_cvtepi8_epi16(_mm_set1_epi64x(x)); }
template <int S> static inline I16 dot_step(I16 acc, W16 w, Act a) {
    const __m256i pair = _mm256_shuffle_epi32(a, 0x55 * S);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, pair)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, pair))};
}
#endif

static inline void inflate_tile(const uint8_t* p, Levels signed_levels, int8_t* first, int8_t* second) {
    for (int i = 0; i < 32; i++) {
        _mm256_storeu_si256((__m256i*)(first + 32 * i), expand(p + 16 * i, signed_levels));
        _mm256_storeu_si256((__m256i*)(second + 32 * i), expand(p + 512 + 16 * i, signed_levels));
    }
}

// Sixteen float lanes in two AVX2 registers; meanings as in v16_portable.h.
#pragma once
#include <immintrin.h>
#include <cstdint>

struct V16 { __m256 a, b; };
struct I16 { __m256i a, b; };

static inline V16 vset(float x) { __m256 r = _mm256_set1_ps(x); return {r, r}; }
static inline V16 vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vstore(float* p, V16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
#define BOTH(name, op) static inline V16 name(V16 x, V16 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
BOTH(vadd, _mm256_add_ps) BOTH(vsub, _mm256_sub_ps) BOTH(vmul, _mm256_mul_ps) BOTH(vdiv, _mm256_div_ps)
BOTH(vmax, _mm256_max_ps) BOTH(vmin, _mm256_min_ps)
#undef BOTH
static inline V16 vfma(V16 x, V16 y, V16 c) { return {_mm256_fmadd_ps(x.a, y.a, c.a), _mm256_fmadd_ps(x.b, y.b, c.b)}; }
static inline V16 vless_select(V16 x, V16 y, V16 yes, V16 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline I16 vround(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline V16 vfloat(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I16 iload(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))}; }
static inline void istore(int32_t* p, I16 x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)(p + 8), x.b); }
static inline I16 iset(int32_t x) { __m256i r = _mm256_set1_epi32(x); return {r, r}; }
#define BOTH(name, op) static inline I16 name(I16 x, I16 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
BOTH(iadd, _mm256_add_epi32) BOTH(isub, _mm256_sub_epi32) BOTH(imax_unsigned, _mm256_max_epu32)
#undef BOTH
static inline V16 vexp2i(I16 n) {
    n = iadd(n, iset(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(n.a, 23)), _mm256_castsi256_ps(_mm256_slli_epi32(n.b, 23))};
}
static inline I16 vabs_bits(V16 x) {
    __m256i m = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), m), _mm256_and_si256(_mm256_castps_si256(x.b), m)};
}
static inline void istore_i8(int8_t* p, I16 x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);  // 16 words in order
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
static inline I16 iload_i8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
template <int H> static inline V16 vswap(V16 x) {
    if constexpr (H == 1) return {_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)};
    else if constexpr (H == 2) return {_mm256_permute_ps(x.a, 0x4E), _mm256_permute_ps(x.b, 0x4E)};
    else if constexpr (H == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    else return {x.b, x.a};
}
template <int H> static inline V16 vflip(V16 x) {
    const __m256 all = _mm256_set1_ps(-0.0f);
    if constexpr (H == 8) return {x.a, _mm256_xor_ps(x.b, all)};
    else {
        constexpr int odd = H == 1 ? 0xAA : H == 2 ? 0xCC : 0xF0;
        const __m256 m = _mm256_blend_ps(_mm256_setzero_ps(), all, odd);
        return {_mm256_xor_ps(x.a, m), _mm256_xor_ps(x.b, m)};
    }
}
static inline V16 vload_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline void vstore_half(uint16_t* p, V16 x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
static inline float vsum(V16 x) {
    __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
static inline float vmax_lanes(V16 x) {
    __m256 b = _mm256_max_ps(x.a, x.b);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
static inline uint32_t imax_unsigned_lanes(I16 x) {
    alignas(32) uint32_t t[8]; _mm256_store_si256((__m256i*)t, _mm256_max_epu32(x.a, x.b));
    uint32_t m = 0; for (int i = 0; i < 8; i++) m = t[i] > m ? t[i] : m;
    return m;
}
static inline int32_t isum(I16 x) {
    alignas(32) uint32_t t[8]; _mm256_store_si256((__m256i*)t, _mm256_add_epi32(x.a, x.b));
    uint32_t s = 0; for (int i = 0; i < 8; i++) s += t[i];
    return (int32_t)s;
}

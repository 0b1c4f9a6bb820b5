// Sixteen float lanes in one AVX-512 register; meanings as in v16_portable.h.
#pragma once
#include <immintrin.h>
#include <cstdint>

using V16 = __m512;
using I16 = __m512i;

static inline V16 vset(float x) { return _mm512_set1_ps(x); }
static inline V16 vzero() { return _mm512_setzero_ps(); }
static inline V16 vload(const float* p) { return _mm512_loadu_ps(p); }
static inline void vstore(float* p, V16 a) { _mm512_storeu_ps(p, a); }
static inline V16 vadd(V16 a, V16 b) { return _mm512_add_ps(a, b); }
static inline V16 vsub(V16 a, V16 b) { return _mm512_sub_ps(a, b); }
static inline V16 vmul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
static inline V16 vdiv(V16 a, V16 b) { return _mm512_div_ps(a, b); }
static inline V16 vfma(V16 a, V16 b, V16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline V16 vmax(V16 a, V16 b) { return _mm512_max_ps(a, b); }
static inline V16 vmin(V16 a, V16 b) { return _mm512_min_ps(a, b); }
static inline V16 vless_select(V16 a, V16 b, V16 yes, V16 no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static inline I16 vround(V16 a) { return _mm512_cvtps_epi32(a); }
static inline V16 vfloat(I16 a) { return _mm512_cvtepi32_ps(a); }
static inline I16 iload(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline void istore(int32_t* p, I16 a) { _mm512_storeu_si512(p, a); }
static inline I16 iset(int32_t x) { return _mm512_set1_epi32(x); }
static inline I16 iadd(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
static inline I16 isub(I16 a, I16 b) { return _mm512_sub_epi32(a, b); }
static inline I16 imax_unsigned(I16 a, I16 b) { return _mm512_max_epu32(a, b); }
static inline V16 vexp2i(I16 n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, iset(127)), 23)); }
static inline I16 vabs_bits(V16 a) { return _mm512_and_si512(_mm512_castps_si512(a), iset(0x7fffffff)); }
static inline void istore_i8(int8_t* p, I16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
static inline I16 iload_i8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
template <int H> static inline V16 vswap(V16 a) {
    if constexpr (H == 1) return _mm512_permute_ps(a, 0xB1);
    else if constexpr (H == 2) return _mm512_permute_ps(a, 0x4E);
    else if constexpr (H == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
    else return _mm512_shuffle_f32x4(a, a, 0x4E);
}
template <int H> static inline V16 vflip(V16 a) {
    constexpr __mmask16 odd = H == 1 ? 0xAAAA : H == 2 ? 0xCCCC : H == 4 ? 0xF0F0 : 0xFF00;
    return _mm512_mask_xor_ps(a, odd, a, vset(-0.0f));
}
static inline V16 vload_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void vstore_half(uint16_t* p, V16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
static inline float vsum(V16 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
static inline float vmax_lanes(V16 a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
static inline uint32_t imax_unsigned_lanes(I16 a) { return _mm512_reduce_max_epu32(a); }
static inline int32_t isum(I16 a) {   // not _mm512_reduce_add_epi32: the compiler takes its signed overflow for undefined
    __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xB1)));
}

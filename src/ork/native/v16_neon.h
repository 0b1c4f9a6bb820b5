// Sixteen float lanes in four NEON registers; meanings as in v16_portable.h.
#pragma once
#include <arm_neon.h>
#include <cstdint>

struct V16 { float32x4_t q[4]; };
struct I16 { int32x4_t q[4]; };

#define QUADS for (int i = 0; i < 4; i++)
static inline V16 vset(float x) { V16 r; QUADS r.q[i] = vdupq_n_f32(x); return r; }
static inline V16 vzero() { return vset(0.0f); }
static inline V16 vload(const float* p) { V16 r; QUADS r.q[i] = vld1q_f32(p + 4 * i); return r; }
static inline void vstore(float* p, V16 a) { QUADS vst1q_f32(p + 4 * i, a.q[i]); }
static inline V16 vadd(V16 a, V16 b) { QUADS a.q[i] = vaddq_f32(a.q[i], b.q[i]); return a; }
static inline V16 vsub(V16 a, V16 b) { QUADS a.q[i] = vsubq_f32(a.q[i], b.q[i]); return a; }
static inline V16 vmul(V16 a, V16 b) { QUADS a.q[i] = vmulq_f32(a.q[i], b.q[i]); return a; }
static inline V16 vdiv(V16 a, V16 b) { QUADS a.q[i] = vdivq_f32(a.q[i], b.q[i]); return a; }
static inline V16 vfma(V16 a, V16 b, V16 c) { QUADS c.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]); return c; }
static inline V16 vmax(V16 a, V16 b) { QUADS a.q[i] = vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); return a; }
static inline V16 vmin(V16 a, V16 b) { QUADS a.q[i] = vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); return a; }
static inline V16 vless_select(V16 a, V16 b, V16 yes, V16 no) { QUADS no.q[i] = vbslq_f32(vcltq_f32(a.q[i], b.q[i]), yes.q[i], no.q[i]); return no; }
static inline I16 vround(V16 a) { I16 r; QUADS r.q[i] = vcvtnq_s32_f32(a.q[i]); return r; }
static inline V16 vfloat(I16 a) { V16 r; QUADS r.q[i] = vcvtq_f32_s32(a.q[i]); return r; }
static inline I16 iload(const int32_t* p) { I16 r; QUADS r.q[i] = vld1q_s32(p + 4 * i); return r; }
static inline void istore(int32_t* p, I16 a) { QUADS vst1q_s32(p + 4 * i, a.q[i]); }
static inline I16 iset(int32_t x) { I16 r; QUADS r.q[i] = vdupq_n_s32(x); return r; }
static inline I16 iadd(I16 a, I16 b) { QUADS a.q[i] = vaddq_s32(a.q[i], b.q[i]); return a; }
static inline I16 isub(I16 a, I16 b) { QUADS a.q[i] = vsubq_s32(a.q[i], b.q[i]); return a; }
static inline I16 imax_unsigned(I16 a, I16 b) {
    QUADS a.q[i] = vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(a.q[i]), vreinterpretq_u32_s32(b.q[i])));
    return a;
}
static inline V16 vexp2i(I16 n) { V16 r; QUADS r.q[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.q[i], vdupq_n_s32(127)), 23)); return r; }
static inline I16 vabs_bits(V16 a) { I16 r; QUADS r.q[i] = vandq_s32(vreinterpretq_s32_f32(a.q[i]), vdupq_n_s32(0x7fffffff)); return r; }
static inline void istore_i8(int8_t* p, I16 a) {
    int16x8_t lo = vcombine_s16(vmovn_s32(a.q[0]), vmovn_s32(a.q[1])), hi = vcombine_s16(vmovn_s32(a.q[2]), vmovn_s32(a.q[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
static inline I16 iload_i8(const int8_t* p) {
    int8x16_t b = vld1q_s8(p);
    int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
    return {{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)), vmovl_s16(vget_low_s16(hi)), vmovl_s16(vget_high_s16(hi))}};
}
template <int H> static inline V16 vswap(V16 a) {
    V16 r;
    if constexpr (H == 1) { QUADS r.q[i] = vrev64q_f32(a.q[i]); }
    else if constexpr (H == 2) { QUADS r.q[i] = vextq_f32(a.q[i], a.q[i], 2); }
    else { QUADS r.q[i] = a.q[i ^ (H / 4)]; }
    return r;
}
template <int H> static inline V16 vflip(V16 a) {
    if constexpr (H <= 2) {
        const uint32x4_t m = H == 1 ? uint32x4_t{0, 0x80000000u, 0, 0x80000000u} : uint32x4_t{0, 0, 0x80000000u, 0x80000000u};
        QUADS a.q[i] = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a.q[i]), m));
    } else {
        QUADS if (i & (H / 4)) a.q[i] = vnegq_f32(a.q[i]);
    }
    return a;
}
static inline V16 vload_half(const uint16_t* p) {
    V16 r; QUADS r.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); return r;
}
static inline void vstore_half(uint16_t* p, V16 a) { QUADS vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.q[i]))); }
static inline float vsum(V16 a) {
    float32x4_t c = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
    c = vaddq_f32(c, vextq_f32(c, c, 2));
    return vgetq_lane_f32(c, 0) + vgetq_lane_f32(c, 1);
}
static inline float vmax_lanes(V16 a) {
    float t[16]; vstore(t, a);
    for (int h = 8; h; h >>= 1) for (int i = 0; i < h; i++) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
    return t[0];
}
static inline uint32_t imax_unsigned_lanes(I16 a) {
    uint32x4_t m = vreinterpretq_u32_s32(a.q[0]);
    for (int i = 1; i < 4; i++) m = vmaxq_u32(m, vreinterpretq_u32_s32(a.q[i]));
    return vmaxvq_u32(m);
}
static inline int32_t isum(I16 a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[1]), vaddq_s32(a.q[2], a.q[3]))); }
#undef QUADS

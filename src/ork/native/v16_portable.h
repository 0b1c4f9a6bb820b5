// Sixteen float lanes in plain C++: the definition that every other v16_*.h must equal bit for bit.
#pragma once
#include <cstdint>
#include <cstring>

struct V16 { float v[16]; };
struct I16 { int32_t v[16]; };

#define LANES for (int i = 0; i < 16; i++)
static inline V16 vset(float x) { V16 r; LANES r.v[i] = x; return r; }
static inline V16 vzero() { return vset(0.0f); }
static inline V16 vload(const float* p) { V16 r; std::memcpy(r.v, p, 64); return r; }
static inline void vstore(float* p, V16 a) { std::memcpy(p, a.v, 64); }
static inline V16 vadd(V16 a, V16 b) { LANES a.v[i] = a.v[i] + b.v[i]; return a; }
static inline V16 vsub(V16 a, V16 b) { LANES a.v[i] = a.v[i] - b.v[i]; return a; }
static inline V16 vmul(V16 a, V16 b) { LANES a.v[i] = a.v[i] * b.v[i]; return a; }
static inline V16 vdiv(V16 a, V16 b) { LANES a.v[i] = a.v[i] / b.v[i]; return a; }
static inline V16 vfma(V16 a, V16 b, V16 c) { LANES c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return c; }
// Not IEEE maxNum: the first operand wins only when it compares greater, so NaN and -0 behave alike everywhere.
static inline V16 vmax(V16 a, V16 b) { LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V16 vmin(V16 a, V16 b) { LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V16 vless_select(V16 a, V16 b, V16 yes, V16 no) { LANES no.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; return no; }
// Round half to even; the argument is within +-2^22, where adding 1.5 * 2^23 rounds as the hardware does.
static inline I16 vround(V16 a) {
    I16 r;
    LANES { float t = a.v[i] + 12582912.0f; int32_t b; std::memcpy(&b, &t, 4); r.v[i] = b - 0x4B400000; }
    return r;
}
static inline V16 vfloat(I16 a) { V16 r; LANES r.v[i] = (float)a.v[i]; return r; }
static inline I16 iload(const int32_t* p) { I16 r; std::memcpy(r.v, p, 64); return r; }
static inline void istore(int32_t* p, I16 a) { std::memcpy(p, a.v, 64); }
static inline I16 iset(int32_t x) { I16 r; LANES r.v[i] = x; return r; }
static inline I16 iadd(I16 a, I16 b) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
static inline I16 isub(I16 a, I16 b) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return a; }
static inline I16 imax_unsigned(I16 a, I16 b) { LANES a.v[i] = (uint32_t)a.v[i] > (uint32_t)b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V16 vexp2i(I16 n) { V16 r; LANES { int32_t b = (int32_t)((uint32_t)(n.v[i] + 127) << 23); std::memcpy(&r.v[i], &b, 4); } return r; }
static inline I16 vabs_bits(V16 a) { I16 r; LANES { uint32_t b; std::memcpy(&b, &a.v[i], 4); r.v[i] = (int32_t)(b & 0x7fffffffu); } return r; }
static inline void istore_i8(int8_t* p, I16 a) { LANES p[i] = (int8_t)a.v[i]; }
static inline I16 iload_i8(const int8_t* p) { I16 r; LANES r.v[i] = p[i]; return r; }
// Lane i of the result is lane i ^ H of the argument.
template <int H> static inline V16 vswap(V16 a) { V16 r; LANES r.v[i] = a.v[i ^ H]; return r; }
// The lanes whose index has bit H set change sign.
template <int H> static inline V16 vflip(V16 a) { LANES a.v[i] = (i & H) ? -a.v[i] : a.v[i]; return a; }

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 1023, bits;
    if (e == 31) bits = sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0);  // conversion quiets a NaN
    else if (e) bits = sign | ((e + 112) << 23) | (m << 13);
    else { float f = (float)m * 5.9604644775390625e-8f; std::memcpy(&bits, &f, 4); bits |= sign; }
    float f; std::memcpy(&f, &bits, 4); return f;
}
static inline uint16_t float_to_half(float f) {  // round half to even, overflow to infinity, subnormals kept
    uint32_t x; std::memcpy(&x, &f, 4);
    uint32_t sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) {  // below the smallest normal half: the float adder rounds at the right place
        float t; std::memcpy(&t, &a, 4); t += 0.5f; uint32_t b; std::memcpy(&b, &t, 4);
        return (uint16_t)(sign | (b - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13));
}
static inline V16 vload_half(const uint16_t* p) { V16 r; LANES r.v[i] = half_to_float(p[i]); return r; }
static inline void vstore_half(uint16_t* p, V16 a) { LANES p[i] = float_to_half(a.v[i]); }
// The fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
static inline float vsum(V16 a) {
    for (int h = 8; h; h >>= 1) for (int i = 0; i < h; i++) a.v[i] = a.v[i] + a.v[i + h];
    return a.v[0];
}
static inline float vmax_lanes(V16 a) {
    for (int h = 8; h; h >>= 1) for (int i = 0; i < h; i++) a.v[i] = a.v[i] > a.v[i + h] ? a.v[i] : a.v[i + h];
    return a.v[0];
}
static inline uint32_t imax_unsigned_lanes(I16 a) { uint32_t m = 0; LANES m = (uint32_t)a.v[i] > m ? (uint32_t)a.v[i] : m; return m; }
static inline int32_t isum(I16 a) { uint32_t s = 0; LANES s += (uint32_t)a.v[i]; return (int32_t)s; }
#undef LANES

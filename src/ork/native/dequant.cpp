#include "dequant.h"

#include <cstring>

// The loops below are written for the compiler's vectoriser: fixed trip counts, no branches, one rounding an
// operation (-ffp-contract=off), so every instruction set gives the same bits. On x86 GCC makes an AVX2 copy of each
// and picks one at load time; elsewhere the baseline (NEON on Arm) is what there is.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define ORK_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define ORK_CLONES
#endif
#define ORK_INLINE static inline __attribute__((always_inline))

namespace ork {
namespace {

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

ORK_INLINE float as_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

ORK_INLINE uint32_t as_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

// IEEE half to single: exact for every finite value; infinities stay, NaNs keep their payload.
ORK_INLINE float half(uint32_t h) {
    const uint32_t m = h & 0x7fff;
    const uint32_t normal = (m << 13) + (m >= 0x7c00 ? 224u << 23 : 112u << 23);
    const uint32_t tiny = as_bits(static_cast<float>(static_cast<int32_t>(m)) * 0x1p-24f);
    return as_float((m < 0x400 ? tiny : normal) | (h & 0x8000) << 16);
}

ORK_INLINE uint32_t u16(const uint8_t* p) { return p[0] | static_cast<uint32_t>(p[1]) << 8; }
ORK_INLINE uint32_t u32(const uint8_t* p) { return u16(p) | u16(p + 2) << 16; }
ORK_INLINE float f16(const uint8_t* p) { return half(u16(p)); }

// --- one function a type; `x` walks the blocks, `y` the floats ---------------------------------------------------

void expand_f32(const uint8_t* x, float* y, size_t blocks) {
    if (blocks) std::memcpy(y, x, blocks * 4);
}

ORK_CLONES void expand_f16(const uint8_t* x, float* y, size_t blocks) {
    for (size_t i = 0; i < blocks; i++) {
        uint16_t h;
        std::memcpy(&h, x + 2 * i, 2);
        y[i] = half(h);
    }
}

ORK_CLONES void expand_bf16(const uint8_t* x, float* y, size_t blocks) {
    for (size_t i = 0; i < blocks; i++) {
        uint16_t h;
        std::memcpy(&h, x + 2 * i, 2);
        y[i] = as_float(static_cast<uint32_t>(h) << 16);
    }
}

// f16 d, 16 bytes of nibbles: element j is the low nibble of byte j, element 16 + j the high one.
ORK_CLONES void expand_q4_0(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 18, y += 32) {
        const float d = f16(x);
        for (int j = 0; j < 16; j++) y[j] = d * static_cast<float>((x[2 + j] & 15) - 8);
        for (int j = 0; j < 16; j++) y[16 + j] = d * static_cast<float>((x[2 + j] >> 4) - 8);
    }
}

// f16 d, f16 m, nibbles.
ORK_CLONES void expand_q4_1(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 20, y += 32) {
        const float d = f16(x), m = f16(x + 2);
        for (int j = 0; j < 16; j++) y[j] = d * static_cast<float>(x[4 + j] & 15) + m;
        for (int j = 0; j < 16; j++) y[16 + j] = d * static_cast<float>(x[4 + j] >> 4) + m;
    }
}

// f16 d, u32 of fifth bits (bit j belongs to element j), nibbles.
ORK_CLONES void expand_q5_0(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 22, y += 32) {
        const float d = f16(x);
        const uint32_t high = u32(x + 2);
        for (int j = 0; j < 16; j++) {
            const int q = (x[6 + j] & 15) | static_cast<int>((high >> j & 1) << 4);
            y[j] = d * static_cast<float>(q - 16);
        }
        for (int j = 0; j < 16; j++) {
            const int q = (x[6 + j] >> 4) | static_cast<int>((high >> (16 + j) & 1) << 4);
            y[16 + j] = d * static_cast<float>(q - 16);
        }
    }
}

// f16 d, f16 m, fifth bits, nibbles.
ORK_CLONES void expand_q5_1(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 24, y += 32) {
        const float d = f16(x), m = f16(x + 2);
        const uint32_t high = u32(x + 4);
        for (int j = 0; j < 16; j++) {
            const int q = (x[8 + j] & 15) | static_cast<int>((high >> j & 1) << 4);
            y[j] = d * static_cast<float>(q) + m;
        }
        for (int j = 0; j < 16; j++) {
            const int q = (x[8 + j] >> 4) | static_cast<int>((high >> (16 + j) & 1) << 4);
            y[16 + j] = d * static_cast<float>(q) + m;
        }
    }
}

// f16 d, 32 int8.
ORK_CLONES void expand_q8_0(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 34, y += 32) {
        const float d = f16(x);
        const int8_t* q = reinterpret_cast<const int8_t*>(x + 2);
        for (int j = 0; j < 32; j++) y[j] = d * static_cast<float>(q[j]);
    }
}

// K-quants: 256 elements. In the 2-bit planes, element 128 h + 32 s + l is bits 2 s of byte 32 h + l.

// 16 bytes of (scale, min) nibbles, 64 bytes of 2-bit codes, f16 d, f16 dmin.
ORK_CLONES void expand_q2_k(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 84, y += 256) {
        const float d = f16(x + 80), dmin = f16(x + 82);
        for (int g = 0; g < 16; g++) {
            const float scale = d * static_cast<float>(x[g] & 15), min = dmin * static_cast<float>(x[g] >> 4);
            const uint8_t* q = x + 16 + 32 * (g / 8) + 16 * (g % 2);
            const int shift = g % 8 / 2 * 2;
            for (int l = 0; l < 16; l++) y[16 * g + l] = scale * static_cast<float>(q[l] >> shift & 3) - min;
        }
    }
}

// 32 bytes of third bits (bit s of byte l: element 32 s + l, inverted), 64 bytes of 2-bit codes, 12 bytes of sixteen
// 6-bit scales (low nibbles in 8 bytes, then pairs of high bits), f16 d.
ORK_CLONES void expand_q3_k(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 110, y += 256) {
        const float d = f16(x + 108);
        const uint8_t* packed = x + 96;
        for (int g = 0; g < 16; g++) {
            const int low = packed[g % 8] >> (g / 8 * 4) & 15, high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
            const float scale = d * static_cast<float>((low | high << 4) - 32);
            const uint8_t* q = x + 32 + 32 * (g / 8) + 16 * (g % 2);
            const uint8_t* mask = x + 16 * (g % 2);
            const int shift = g % 8 / 2 * 2, bit = g / 2;
            for (int l = 0; l < 16; l++) {
                const int code = (q[l] >> shift & 3) - (((mask[l] >> bit & 1) ^ 1) << 2);
                y[16 * g + l] = scale * static_cast<float>(code);
            }
        }
    }
}

// Q4_K and Q5_K: eight (scale, min) pairs of 6 bits in 12 bytes.
ORK_INLINE void scale_min(const uint8_t* p, int g, int* scale, int* min) {
    if (g < 4) {
        *scale = p[g] & 63;
        *min = p[4 + g] & 63;
    } else {
        *scale = (p[4 + g] & 15) | (p[g - 4] >> 6) << 4;
        *min = p[4 + g] >> 4 | (p[g] >> 6) << 4;
    }
}

// f16 d, f16 dmin, 12 bytes of scales, 128 bytes of nibbles (32 low ones, then 32 high ones, of each 32 bytes).
ORK_CLONES void expand_q4_k(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 144, y += 256) {
        const float d = f16(x), dmin = f16(x + 2);
        for (int g = 0; g < 8; g++) {
            int s, m;
            scale_min(x + 4, g, &s, &m);
            const float scale = d * static_cast<float>(s), min = dmin * static_cast<float>(m);
            const uint8_t* q = x + 16 + 32 * (g / 2);
            const int shift = g % 2 * 4;
            for (int l = 0; l < 32; l++) y[32 * g + l] = scale * static_cast<float>(q[l] >> shift & 15) - min;
        }
    }
}

// As Q4_K, with 32 bytes of fifth bits (bit g of byte l: element 32 g + l) before the nibbles.
ORK_CLONES void expand_q5_k(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 176, y += 256) {
        const float d = f16(x), dmin = f16(x + 2);
        const uint8_t* high = x + 16;
        for (int g = 0; g < 8; g++) {
            int s, m;
            scale_min(x + 4, g, &s, &m);
            const float scale = d * static_cast<float>(s), min = dmin * static_cast<float>(m);
            const uint8_t* q = x + 48 + 32 * (g / 2);
            const int shift = g % 2 * 4;
            for (int l = 0; l < 32; l++) {
                const int code = (q[l] >> shift & 15) | (high[l] >> g & 1) << 4;
                y[32 * g + l] = scale * static_cast<float>(code) - min;
            }
        }
    }
}

// 128 bytes of low nibbles (element 128 h + 64 n + l: nibble n of byte 64 h + l), 64 bytes of high pairs, 16 int8
// scales, f16 d.
ORK_CLONES void expand_q6_k(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 210, y += 256) {
        const float d = f16(x + 208);
        const int8_t* scales = reinterpret_cast<const int8_t*>(x + 192);
        for (int g = 0; g < 16; g++) {
            const float scale = d * static_cast<float>(scales[g]);
            const uint8_t* low = x + 64 * (g / 8) + 16 * (g % 4);
            const uint8_t* high = x + 128 + 32 * (g / 8) + 16 * (g % 2);
            const int nibble = g % 8 / 4 * 4, pair = g % 8 / 2 * 2;
            for (int l = 0; l < 16; l++) {
                const int code = (low[l] >> nibble & 15) | (high[l] >> pair & 3) << 4;
                y[16 * g + l] = scale * static_cast<float>(code - 32);
            }
        }
    }
}

// f16 d, nibbles that index a table.
ORK_CLONES void expand_iq4_nl(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 18, y += 32) {
        const float d = f16(x);
        for (int j = 0; j < 16; j++) y[j] = d * static_cast<float>(kIq4[x[2 + j] & 15]);
        for (int j = 0; j < 16; j++) y[16 + j] = d * static_cast<float>(kIq4[x[2 + j] >> 4]);
    }
}

// f16 d, u16 of high pairs and 4 bytes of low nibbles of eight 6-bit scales, 128 bytes of nibbles as eight IQ4_NL runs.
ORK_CLONES void expand_iq4_xs(const uint8_t* x, float* y, size_t blocks) {
    for (; blocks--; x += 136, y += 256) {
        const float d = f16(x);
        const uint32_t pairs = u16(x + 2);
        for (int g = 0; g < 8; g++) {
            const int low = x[4 + g / 2] >> (g % 2 * 4) & 15, high = static_cast<int>(pairs >> (2 * g) & 3);
            const float scale = d * static_cast<float>((low | high << 4) - 32);
            const uint8_t* q = x + 8 + 16 * g;
            float* z = y + 32 * g;
            for (int j = 0; j < 16; j++) z[j] = scale * static_cast<float>(kIq4[q[j] & 15]);
            for (int j = 0; j < 16; j++) z[16 + j] = scale * static_cast<float>(kIq4[q[j] >> 4]);
        }
    }
}

}  // namespace

const TensorType kTensorTypes[] = {
    {0, "F32", 1, 4, expand_f32},          {1, "F16", 1, 2, expand_f16},
    {2, "Q4_0", 32, 18, expand_q4_0},      {3, "Q4_1", 32, 20, expand_q4_1},
    {6, "Q5_0", 32, 22, expand_q5_0},      {7, "Q5_1", 32, 24, expand_q5_1},
    {8, "Q8_0", 32, 34, expand_q8_0},      {10, "Q2_K", 256, 84, expand_q2_k},
    {11, "Q3_K", 256, 110, expand_q3_k},   {12, "Q4_K", 256, 144, expand_q4_k},
    {13, "Q5_K", 256, 176, expand_q5_k},   {14, "Q6_K", 256, 210, expand_q6_k},
    {20, "IQ4_NL", 32, 18, expand_iq4_nl}, {23, "IQ4_XS", 256, 136, expand_iq4_xs},
    {30, "BF16", 1, 2, expand_bf16},
};
const size_t kTensorTypeCount = sizeof kTensorTypes / sizeof *kTensorTypes;

const TensorType* find_tensor_type(uint32_t id) {
    for (const TensorType& t : kTensorTypes)
        if (t.id == id) return &t;
    return nullptr;
}

}  // namespace ork

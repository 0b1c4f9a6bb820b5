// 4-bit tiles and panels on NEON; meanings as in panel_portable.h.
#pragma once
#include <arm_neon.h>
#include <cstdint>

constexpr int PANEL_MR = 4, ROWS_IN_PLACE = 2, ROWS_AT_ONCE = 1, AHEAD = 256;
constexpr int panel_nc(int) { return 1; }
constexpr int STEP_CODES = 4, ACT_STEPS = 4, CODE_BYTES = 1;
constexpr bool SPLIT_PANELS = true;

using Levels = int8x16_t;
static inline Levels levels_signed(const int8_t* table) { return vld1q_s8(table); }
static inline Levels levels_of(const int8_t* table) { return levels_signed(table); }

struct Nibbles { int8x16_t even, odd; };   // the levels of one channel's 32 codes
static inline Nibbles split_codes(const uint8_t* p, Levels levels) {
    const uint8x16_t v = vld1q_u8(p);
    return {vqtbl1q_s8(levels, vandq_u8(v, vdupq_n_u8(15))), vqtbl1q_s8(levels, vshrq_n_u8(v, 4))};
}

static inline void split_row(const int8_t* a, int64_t n, int8_t* out) {
    for (int64_t k = 0; k < n; k += 32) {
        const int8x16x2_t x = vld2q_s8(a + k);
        vst1q_s8(out + k, x.val[0]);
        vst1q_s8(out + k + 16, x.val[1]);
    }
}

template <int R> static inline void row_sums(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t, Levels levels, const uint8_t*, I16* sums) {
    for (int64_t t = 0; t < tiles; t++, a += 32) {
        const int8x16_t even = vld1q_s8(a), odd = vld1q_s8(a + 16);
        auto channel = [&](const uint8_t* p) {
            const Nibbles n = split_codes(p, levels);
            return dot16(dot16(vdupq_n_s32(0), n.even, even), n.odd, odd);
        };
        auto four = [&](int32x4_t& sum) {
            sum = vaddq_s32(sum, vpaddq_s32(vpaddq_s32(channel(w), channel(w + 16)), vpaddq_s32(channel(w + 32), channel(w + 48))));
            w += 64;
        };
        four(sums[0].q[0]); four(sums[0].q[1]); four(sums[0].q[2]); four(sums[0].q[3]);
        four(sums[1].q[0]); four(sums[1].q[1]); four(sums[1].q[2]); four(sums[1].q[3]);
        four(sums[2].q[0]); four(sums[2].q[1]); four(sums[2].q[2]); four(sums[2].q[3]);
        four(sums[3].q[0]); four(sums[3].q[1]); four(sums[3].q[2]); four(sums[3].q[3]);
    }
}

// The same of one int8 tile column: 32 channels.
template <int R> static inline void row_sums_i8(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t, bool full_range, const uint8_t*, I16* sums) {
    tile_i8<1>(a, 0, w, tiles, (int32_t (*)[32])sums, full_range);
}

// Four channels of four steps -> four steps of four channels.
struct Four { uint8x16_t q[4]; };
static inline Four transpose4(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    const uint32x4_t p = vtrn1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)), q = vtrn2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
    const uint32x4_t r = vtrn1q_u32(vreinterpretq_u32_u8(c), vreinterpretq_u32_u8(d)), s = vtrn2q_u32(vreinterpretq_u32_u8(c), vreinterpretq_u32_u8(d));
    const uint64x2_t pl = vreinterpretq_u64_u32(p), rl = vreinterpretq_u64_u32(r), ql = vreinterpretq_u64_u32(q), sl = vreinterpretq_u64_u32(s);
    return {{vreinterpretq_u8_u64(vtrn1q_u64(pl, rl)), vreinterpretq_u8_u64(vtrn1q_u64(ql, sl)), vreinterpretq_u8_u64(vtrn2q_u64(pl, rl)), vreinterpretq_u8_u64(vtrn2q_u64(ql, sl))}};
}

static inline void unpack_4bit(const uint8_t* tile, Levels levels, uint8_t* panel) {
    for (int c = 0; c < 64; c += 4, tile += 64, panel += 16) {   // eight codes of a channel move together, then come apart
        const Four t = transpose4(vld1q_u8(tile), vld1q_u8(tile + 16), vld1q_u8(tile + 32), vld1q_u8(tile + 48));
        for (int i = 0; i < 4; i++) {
            vst1q_s8((int8_t*)panel + 256 * i, vqtbl1q_s8(levels, vandq_u8(t.q[i], vdupq_n_u8(15))));
            vst1q_s8((int8_t*)panel + 256 * (4 + i), vqtbl1q_s8(levels, vshrq_n_u8(t.q[i], 4)));
        }
    }
}
static inline void unpack_i8(const uint8_t* tile, uint8_t* panel) {
    for (int c = 0; c < 32; c += 4, tile += 128, panel += 16)
        for (int h = 0; h < 2; h++) {
            const uint8_t* p = tile + 16 * h;
            const Four t = transpose4(vld1q_u8(p), vld1q_u8(p + 32), vld1q_u8(p + 64), vld1q_u8(p + 96));
            for (int i = 0; i < 4; i++) vst1q_u8(panel + 256 * (4 * h + i), t.q[i]);
        }
}

struct W16 { int8x16_t q[4]; };
using Act = int8x16_t;
static inline W16 load_weights(const uint8_t* p) {
    const int8_t* s = (const int8_t*)p;
    return {{vld1q_s8(s), vld1q_s8(s + 16), vld1q_s8(s + 32), vld1q_s8(s + 48)}};
}
static inline Act load_act(const int8_t* a) { return vld1q_s8(a); }
template <int S> static inline int32x4_t dot_lane(int32x4_t acc, int8x16_t w, int8x16_t a) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_laneq_s32(acc, w, a, S);
#else   // pairs are widened before they are added: (-128)^2 twice does not fit 16 bits
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(a), S));
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x))), vpaddlq_s16(vmull_high_s8(w, x))));
#endif
}
template <int S> static inline I16 dot_step(I16 acc, W16 w, Act a) {
    return {{dot_lane<S>(acc.q[0], w.q[0], a), dot_lane<S>(acc.q[1], w.q[1], a), dot_lane<S>(acc.q[2], w.q[2], a), dot_lane<S>(acc.q[3], w.q[3], a)}};
}

static inline void inflate_tile(const uint8_t* p, Levels signed_levels, int8_t* first, int8_t* second) {
    for (int i = 0; i < 64; i++) {
        const Nibbles n = split_codes(p + 16 * i, signed_levels);
        const int8x16x2_t both = {{n.even, n.odd}};
        vst2q_s8((i < 32 ? first : second - 1024) + 32 * i, both);
    }
}

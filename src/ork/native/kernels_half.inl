// Embedding look-ups from every codec's tiles, and products with f16 weights. Included inside an ISA's namespace, after its rows.

// --- look-up: one column of a slice, un-tiled, scaled, rotated back ---------------------------------------------------------

// The 32 codes of one channel in one tile, as the integers (nf4: levels) that the scales multiply.
static inline void tile_codes(Codec codec, const uint8_t* p, int8_t* out) {
    if (codec == Codec::i8) { __builtin_memcpy(out, p, 32); return; }
    for (int i = 0; i < 16; i++) {
        const int lo = p[i] & 15, hi = p[i] >> 4;
        if (codec == Codec::nf4) { out[2 * i] = NF4_LEVELS[lo]; out[2 * i + 1] = NF4_LEVELS[hi]; }
        else { out[2 * i] = (int8_t)((lo ^ 8) - 8); out[2 * i + 1] = (int8_t)((hi ^ 8) - 8); }
    }
}

static inline float half_value(uint16_t h) {
    const uint16_t lanes[16] = {h};
    float f[16];
    vstore(f, vload_half(lanes));
    return f[0];
}

static void gather_codes(const Slice& s, int64_t column, int64_t K, const Rotation& r, float* out) {
    const int64_t G = s.codec == Codec::i8 ? GROUP_I8 : GROUP_I4, run = s.codec == Codec::i8 ? 32 : 16;   // bytes of 32 codes
    const int64_t panel = column / G, lane = column % G, groups = s.group ? s.Kp / s.group : 1;
    const uint16_t* group_scale = s.group ? s.group_scales + panel * groups * G + lane : nullptr;
    for (int64_t k = 0; k < K; k += 32) {
        int8_t codes[32];
        tile_codes(s.codec, s.codes + (k / s.ks * s.n * s.ks + panel * G * s.ks) / 32 * run + (k % s.ks / 32 * G + lane) * run, codes);
        float f = s.scales[column];
        if (s.group) f = half_value(group_scale[k / s.group * G]) * f;
        for (int64_t i = 0; i < 32 && k + i < K; i += 16) {
            const V16 v = vmul(vfloat(iload_i8(codes + i)), vset(f));
            if (k + i + 16 <= K) vstore(out + k + i, v);
            else vstore_part(out + k + i, v, K - k - i);
        }
    }
    rotate(out, 1, K, K, r, true);
}

// Where f16 tile [16 channels][32 inputs] of column group g (of 16) and inputs from k on lies.
static inline const uint16_t* half_tile(const Slice& s, int64_t g, int64_t k) {
    return (const uint16_t*)s.codes + k / s.ks * s.n * s.ks + g * GROUP_F32 * s.ks + k % s.ks / 32 * (GROUP_F32 * 32);
}

static void gather(const Slice& s, int64_t column, int64_t K, const Rotation& r, float* out) {
    if (is_quantised(s.codec)) return gather_codes(s, column, K, r, out);
    const int64_t g = column / GROUP_F32, lane = column % GROUP_F32;
    if (s.codec == Codec::f32) {
        const float* p = (const float*)s.codes + g * GROUP_F32 * s.Kp + lane;
        for (int64_t k = 0; k < K; k++) out[k] = p[k * GROUP_F32];
        return;
    }
    for (int64_t k = 0; k < K; k += 32) {
        const uint16_t* p = half_tile(s, g, k) + lane * 32;
        for (int64_t i = 0; i < 32 && k + i < K; i += 16) {
            const V16 v = vload_half(p + i);
            if (k + i + 16 <= K) vstore(out + k + i, v);
            else vstore_part(out + k + i, v, K - k - i);
        }
    }
}

// --- products: f16 weights become f32 exactly, then as linear_f32: vectorised across outputs, K ascending, one fma an element

constexpr int64_t HALF_CHUNK = 256;   // inputs expanded at a time: what the rows then read stays in the first cache

// Inputs [k, k + n) of a group of 16 columns as f32 [n][16].
static inline void expand_halves(const Slice& s, int64_t g, int64_t k, int64_t n, float* out) {
    uint16_t turned[32 * 16];
    for (int64_t t = 0; t < n; t += 32) {
        const uint16_t* p = half_tile(s, g, k + t);
        for (int i = 0; i < 32; i++)
            for (int c = 0; c < 16; c++) turned[i * 16 + c] = p[c * 32 + i];
        for (int i = 0; i < 32; i++) vstore(out + (t + i) * 16, vload_half(turned + i * 16));
    }
}

static void linear_f16(const Mat& x, int64_t m0, int64_t m1, const Slice& s, int64_t g0, int64_t g1, const Mat& out, const float* bias) {
    alignas(64) float lo_w[HALF_CHUNK * 16], hi_w[HALF_CHUNK * 16];
    for (int64_t g = g0; g < g1; g++) {
        const int64_t n = s.n0 + g * 32;
        for (int64_t k0 = 0; k0 < x.cols; k0 += HALF_CHUNK) {
            const int64_t count = x.cols - k0 < HALF_CHUNK ? x.cols - k0 : HALF_CHUNK, tiles = (count + 31) / 32 * 32;
            expand_halves(s, 2 * g, k0, tiles, lo_w);
            expand_halves(s, 2 * g + 1, k0, tiles, hi_w);
            const bool first = k0 == 0, last = k0 + count == x.cols;
            for_panels<F32_ROWS>(m0, m1, [&](auto rows, int64_t m) {
                constexpr int MR = decltype(rows)::value;
                const float* a = x.data + m * x.stride + k0;
                float* o = out.data + m * out.stride + n;   // holds the sums so far
                V16 lo[MR], hi[MR];
                for (int i = 0; i < MR; i++) { lo[i] = first ? vzero() : vload(o + i * out.stride); hi[i] = first ? vzero() : vload(o + i * out.stride + 16); }
                for (int64_t k = 0; k < count; k++) {
                    const V16 p = vload(lo_w + k * 16), q = vload(hi_w + k * 16);
                    for (int i = 0; i < MR; i++) {
                        const V16 v = vset(a[i * x.stride + k]);
                        lo[i] = vfma(v, p, lo[i]);
                        hi[i] = vfma(v, q, hi[i]);
                    }
                }
                for (int i = 0; i < MR; i++) {
                    if (last && bias) { lo[i] = vadd(lo[i], vload(bias + n)); hi[i] = vadd(hi[i], vload(bias + n + 16)); }
                    vstore(o + i * out.stride, lo[i]);
                    vstore(o + i * out.stride + 16, hi[i]);
                }
            });
        }
    }
}

// Matrix products straight from the slices. Included inside an ISA's namespace, after its dot_*.h and v16_*.h.

// Exact sums of MR rows with one group of 32 columns, K slices added in order (integers: any order gives the same).
template <int MR> static inline void group_sums(const Rows& x, int64_t m, const Slice& s, int64_t g, int32_t (*sums)[32]) {
    __builtin_memset(sums, 0, sizeof(int32_t) * 32 * MR);
    const int8_t* a = x.codes + m * x.Kp;
    for (int64_t k = 0; k < s.Kp; k += s.ks)
        tile_i8<MR>(a + k, x.Kp, s.codes + k * s.n + g * 32 * s.ks, s.ks / 32, sums, x.full_range);
    if (CORRECTION)
        for (int i = 0; i < MR; i++)
            for (int c = 0; c < 32; c++) sums[i][c] -= CORRECTION * x.sums[m + i];
}

template <int MR> static inline void linear_panel(const Rows& x, int64_t m, const Slice& s, int64_t g, const Mat& out, const float* bias) {
    alignas(64) int32_t sums[MR][32];
    group_sums<MR>(x, m, s, g, sums);
    const int64_t n = s.n0 + g * 32;
    for (int i = 0; i < MR; i++) {
        const V16 scale = vset(x.scales[m + i]);
        float* o = out.data + (m + i) * out.stride + n;
        for (int c = 0; c < 32; c += 16) {
            V16 y = vmul(vfloat(iload(sums[i] + c)), vmul(scale, vload(s.scales + g * 32 + c)));
            if (bias) y = vadd(y, vload(bias + n + c));
            vstore(o + c, y);
        }
    }
}

// Rows in blocks that stay in the L2 cache, groups of columns inside, panels of rows innermost.
constexpr int64_t L2_ROWS_BYTES = 384 * 1024;

static void linear_i8(const Rows& x, int64_t m0, int64_t m1, const Slice& s, int64_t g0, int64_t g1, const Mat& out, const float* bias) {
    int64_t block = L2_ROWS_BYTES / x.Kp / PANEL_ROWS * PANEL_ROWS;
    if (block < PANEL_ROWS) block = PANEL_ROWS;
    for (int64_t b = m0; b < m1; b += block) {
        const int64_t e = b + block < m1 ? b + block : m1;
        for (int64_t g = g0; g < g1; g++)
            for_panels<PANEL_ROWS>(b, e, [&](auto rows, int64_t m) { linear_panel<decltype(rows)::value>(x, m, s, g, out, bias); });
    }
}

static void accumulate_i8(const Rows& x, const Slice& s, int64_t g0, int64_t g1, int32_t* out, int64_t stride) {
    for (int64_t g = g0; g < g1; g++)
        for_panels<PANEL_ROWS>(0, x.M, [&](auto rows, int64_t m) {
            constexpr int MR = decltype(rows)::value;
            alignas(64) int32_t sums[MR][32];
            group_sums<MR>(x, m, s, g, sums);
            for (int i = 0; i < MR; i++) __builtin_memcpy(out + (m + i) * stride + s.n0 + g * 32, sums[i], 128);
        });
}

// f32: vectorised across outputs, K ascending, one fma an element.
template <int MR> static inline void f32_panel(const Mat& x, int64_t m, const Slice& s, int64_t g, const Mat& out, const float* bias) {
    const int64_t n = s.n0 + g * 32;
    const float* w0 = (const float*)s.codes + g * 32 * s.Kp;
    const float* w1 = w0 + 16 * s.Kp;
    const float* a = x.data + m * x.stride;
    V16 lo[MR], hi[MR];
    for (int i = 0; i < MR; i++) lo[i] = hi[i] = vzero();
    for (int64_t k = 0; k < x.cols; k++) {
        const V16 p = vload(w0 + k * 16), q = vload(w1 + k * 16);
        for (int i = 0; i < MR; i++) {
            const V16 v = vset(a[i * x.stride + k]);
            lo[i] = vfma(v, p, lo[i]);
            hi[i] = vfma(v, q, hi[i]);
        }
    }
    for (int i = 0; i < MR; i++) {
        float* o = out.data + (m + i) * out.stride + n;
        vstore(o, bias ? vadd(lo[i], vload(bias + n)) : lo[i]);
        vstore(o + 16, bias ? vadd(hi[i], vload(bias + n + 16)) : hi[i]);
    }
}

static void linear_f32(const Mat& x, int64_t m0, int64_t m1, const Slice& s, int64_t g0, int64_t g1, const Mat& out, const float* bias) {
    for (int64_t g = g0; g < g1; g++)
        for_panels<F32_ROWS>(m0, m1, [&](auto rows, int64_t m) { f32_panel<decltype(rows)::value>(x, m, s, g, out, bias); });
}

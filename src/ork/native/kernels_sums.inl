// Sums that an NPU made, scaled to what the CPU's products give. Included inside an ISA's namespace, after its v16_*.h.

static inline I16 wide(const int32_t* p) { return iload(p); }
static inline I16 wide(const int16_t* p) {
    alignas(64) int32_t w[16];
    for (int i = 0; i < 16; i++) w[i] = p[i];
    return iload(w);
}

template <class T> static inline I16 add_parts(const void* const* parts, int64_t count, int64_t at) {
    I16 sum = wide((const T*)parts[0] + at);
    for (int64_t i = 1; i < count; i++) sum = iadd(sum, wide((const T*)parts[i] + at));
    return sum;
}

// The arithmetic of linear_i8 (one scale a row) and of linear_grouped, in their order.
template <class T> static void scale_rows(const PartialSums& p, int64_t m0, int64_t m1, const Rows& x, const Slice& s, const Mat& out, const float* bias) {
    const int64_t groups = x.group ? x.Kp / x.group : 1, each = p.count / groups, G = s.codec == Codec::i8 ? GROUP_I8 : GROUP_I4;
    for (int64_t m = m0; m < m1; m++) {
        const float* scale = x.scales + m * groups;
        float* o = out.data + m * out.stride + s.n0;
        for (int64_t c = 0; c < s.n; c += 16) {
            const int64_t at = (m - p.m0) * p.row + c / 64 * p.block + c % 64;
            const V16 channel = vload(s.scales + c);
            V16 y;
            if (!x.group) y = vmul(vfloat(add_parts<T>(p.parts, p.count, at)), vmul(vset(scale[0]), channel));
            else {
                y = vzero();
                for (int64_t g = 0; g < groups; g++) {
                    V16 w = vset(scale[g]);
                    if (s.group_scales) w = vmul(w, vload_half(s.group_scales + (c / G * groups + g) * G + c % G));
                    y = vfma(vfloat(add_parts<T>(p.parts + g * each, each, at)), w, y);
                }
                y = vmul(channel, y);
            }
            if (bias) y = vadd(y, vload(bias + s.n0 + c));
            vstore(o + c, y);
        }
    }
}

static void scale_partial_sums(const PartialSums& p, int64_t m0, int64_t m1, const Rows& x, const Slice& s, const Mat& out, const float* bias) {
    if (p.half) scale_rows<int16_t>(p, m0, m1, x, s, out, bias);
    else scale_rows<int32_t>(p, m0, m1, x, s, out, bias);
}

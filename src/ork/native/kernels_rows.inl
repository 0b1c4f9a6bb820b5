// Kernels on single rows: rotation, quantisation, norms, rotary embedding, gates, gathers. Included inside an ISA's namespace.

// --- block Hadamard: stages of stride 1, 2, 4 ... in that order; every butterfly is (a + b, a - b) --------------------------

template <int H> static inline V16 butterfly_in_register(V16 x) { return vadd(vswap<H>(x), vflip<H>(x)); }

static void hadamard(float* x, int64_t block) {
    if (block < 16) {
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) { float a = x[j], b = x[j + h]; x[j] = a + b; x[j + h] = a - b; }
        return;
    }
    int64_t done;
    if (block >= 64) {
        for (int64_t i = 0; i < block; i += 64) {
            V16 v[4];
            for (int j = 0; j < 4; j++) {
                v[j] = vload(x + i + 16 * j);
                v[j] = butterfly_in_register<1>(v[j]); v[j] = butterfly_in_register<2>(v[j]);
                v[j] = butterfly_in_register<4>(v[j]); v[j] = butterfly_in_register<8>(v[j]);
            }
            V16 a = vadd(v[0], v[1]), b = vsub(v[0], v[1]), c = vadd(v[2], v[3]), d = vsub(v[2], v[3]);
            vstore(x + i, vadd(a, c)); vstore(x + i + 16, vadd(b, d));
            vstore(x + i + 32, vsub(a, c)); vstore(x + i + 48, vsub(b, d));
        }
        done = 64;
    } else {
        for (int64_t i = 0; i < block; i += 16) {
            V16 v = vload(x + i);
            v = butterfly_in_register<1>(v); v = butterfly_in_register<2>(v);
            v = butterfly_in_register<4>(v); v = butterfly_in_register<8>(v);
            vstore(x + i, v);
        }
        done = 16;
    }
    int64_t h = done;
    for (; 4 * h <= block; h *= 4)   // two stages a pass
        for (int64_t i = 0; i < block; i += 4 * h)
            for (int64_t j = i; j < i + h; j += 16) {
                V16 p = vload(x + j), q = vload(x + j + h), r = vload(x + j + 2 * h), s = vload(x + j + 3 * h);
                V16 a = vadd(p, q), b = vsub(p, q), c = vadd(r, s), d = vsub(r, s);
                vstore(x + j, vadd(a, c)); vstore(x + j + h, vadd(b, d));
                vstore(x + j + 2 * h, vsub(a, c)); vstore(x + j + 3 * h, vsub(b, d));
            }
    for (; h < block; h *= 2)
        for (int64_t i = 0; i < block; i += 2 * h)
            for (int64_t j = i; j < i + h; j += 16) {
                V16 p = vload(x + j), q = vload(x + j + h);
                vstore(x + j, vadd(p, q)); vstore(x + j + h, vsub(p, q));
            }
}

static inline float hadamard_norm(int64_t block) { return 1.0f / __builtin_sqrtf((float)block); }

// --- mixing blocks: element c of block i becomes sum over j ascending, fma from 0, of Q[i][j] * (element c of block j) -------

// Panels of MR rows, then one of what is left.
template <int MR, class F> static inline void for_panels(int64_t m0, int64_t m1, F&& panel) {
    int64_t m = m0;
    for (; m + MR <= m1; m += MR) panel(std::integral_constant<int, MR>(), m);
    if constexpr (MR > 1) if (m < m1) for_panels<MR - 1>(m, m1, panel);
}

// In place, sixteen columns of all blocks at a time; `inverse` takes Q transposed.
static void mix_blocks(float* x, const Rotation& r, bool inverse) {
    alignas(64) float strip[16 * MIX_MAX];
    const int64_t m = r.m, down = inverse ? 1 : m, across = inverse ? m : 1;
    for (int64_t c = 0; c < r.block; c += 16) {
        const int64_t width = r.block - c < 16 ? r.block - c : 16;
        for (int64_t j = 0; j < m; j++) vstore(strip + 16 * j, width == 16 ? vload(x + j * r.block + c) : vload_part(x + j * r.block + c, width));
        for_panels<2 * F32_ROWS>(0, m, [&](auto rows, int64_t i) {
            constexpr int R = decltype(rows)::value;
            const float* q = r.mix + i * down;
            V16 y[R];
            for (int k = 0; k < R; k++) y[k] = vzero();
            for (int64_t j = 0; j < m; j++) {
                const V16 t = vload(strip + 16 * j);
                for (int k = 0; k < R; k++) y[k] = vfma(vset(q[k * down + j * across]), t, y[k]);
            }
            for (int k = 0; k < R; k++) {
                float* to = x + (i + k) * r.block + c;
                if (width == 16) vstore(to, y[k]);
                else vstore_part(to, y[k], width);
            }
        });
    }
}

// --- rotation ---------------------------------------------------------------------------------------------------------------

static void sign_rows(float* to, const float* x, const float* signs, int64_t K) {
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) vstore(to + k, vmul(vload(x + k), vload(signs + k)));
    for (; k < K; k++) to[k] = x[k] * signs[k];
}

static void scale_row(float* x, float f, int64_t K) {
    const V16 v = vset(f);
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) vstore(x + k, vmul(vload(x + k), v));
    for (; k < K; k++) x[k] = x[k] * f;
}

static void hadamard_blocks(float* x, int64_t K, int64_t block) { for (int64_t b = 0; b < K; b += block) hadamard(x + b, block); }

static void rotate(float* rows, int64_t count, int64_t stride, int64_t K, const Rotation& r, bool inverse) {
    if (!r.signs) return;
    for (int64_t m = 0; m < count; m++) {
        float* x = rows + m * stride;
        if (!inverse) sign_rows(x, x, r.signs, K);
        if (inverse && r.mix) mix_blocks(x, r, true);
        hadamard_blocks(x, K, r.block);
        if (!inverse && r.mix) mix_blocks(x, r, false);
        scale_row(x, hadamard_norm(r.block), K);
        if (inverse) sign_rows(x, x, r.signs, K);
    }
}

// --- quantisation: absmax over the row or a group of it, with limit L (127, or 7 where activations have four bits) ----------
// code = round_half_even(x * (L / absmax)), scale = absmax / L (times the rotation's norm). A row or group that holds an infinity
// or NaN gets codes 0 and a NaN scale, so that it shows in every output; one whose absmax has no reciprocal is zero.

// From bits of absmax to (L / absmax, scale), 0 and 0 where there is nothing to scale.
static inline void absmax_scales(V16 amax, V16 limit, V16 norm, bool rotated, V16* inv, V16* scale) {
    const V16 zero = vzero(), big = vset(3.4028234e38f), infinite = vset(__builtin_inff());
    V16 f = vless_select(zero, amax, vdiv(limit, amax), zero);
    f = vless_select(amax, infinite, f, zero);
    f = vless_select(big, f, zero, f);
    V16 s = vless_select(zero, f, vdiv(amax, limit), zero);
    if (rotated) s = vmul(s, norm);
    *inv = f;
    *scale = vless_select(amax, infinite, s, vset(__builtin_nanf("")));
}

static inline I16 absmax_bits(const float* x, int64_t n) {
    I16 top = iset(0);
    for (int64_t k = 0; k < n; k += 16) top = imax_unsigned(top, vabs_bits(vload(x + k)));
    return top;
}

static inline int32_t store_codes(const float* x, int64_t n, float inv, int8_t* q) {
    const V16 f = vset(inv);
    I16 sum = iset(0);
    for (int64_t k = 0; k < n; k += 16) {
        I16 c = vround(vmul(vload(x + k), f));   // |x * inv| < L + 0.5, so the code is within +-L
        sum = iadd(sum, c);
        istore_i8(q + k, c);
    }
    return isum(sum);
}

// The lanes from K up to `padded` of `x` are zero.
static void quantise_row(const float* x, int64_t padded, const Rotation& r, const RowsOut& out, int64_t row) {
    const int64_t group = out.group ? out.group : padded, count = padded / group;
    const V16 limit = vset((float)out.limit), norm = vset(r.signs ? hadamard_norm(r.block) : 1.0f);
    int8_t* q = out.codes + row * out.Kp;
    float* scales = out.scales + row * count;
    int32_t* sums = out.sums + row * count;
    for (int64_t g = 0; g < count; g += 16) {
        const int64_t n = count - g < 16 ? count - g : 16;
        alignas(64) float amax[16] = {}, inv[16];
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = imax_unsigned_lanes(absmax_bits(x + (g + i) * group, group));
            __builtin_memcpy(&amax[i], &bits, 4);
        }
        V16 f, s;
        absmax_scales(vload(amax), limit, norm, r.signs != nullptr, &f, &s);
        vstore(inv, f);
        if (n == 16) vstore(scales + g, s);
        else vstore_part(scales + g, s, n);
        for (int64_t i = 0; i < n; i++) {
            const int64_t k = (g + i) * group;
            if (inv[i] > 0.0f) sums[g + i] = store_codes(x + k, group, inv[i], q + k);
            else {   // 0 * infinity has no code
                __builtin_memset(q + k, 0, (size_t)group);
                sums[g + i] = 0;
            }
        }
    }
}

static void quantise(const Mat& x, int64_t m0, int64_t m1, const Rotation& r, const RowsOut& out) {
    const int64_t K = x.cols, Kp = out.Kp;
    float fixed[4096];
    float* heap = Kp > 4096 ? new float[Kp] : nullptr;
    float* t = heap ? heap : fixed;
    for (int64_t k = K; k < Kp; k++) t[k] = 0.0f;
    for (int64_t m = m0; m < m1; m++) {
        const float* row = x.data + m * x.stride;
        if (r.signs) {
            sign_rows(t, row, r.signs, K);
            hadamard_blocks(t, K, r.block);
            if (r.mix) mix_blocks(t, r, false);
        } else if (K != Kp) __builtin_memcpy(t, row, sizeof(float) * (size_t)K);
        quantise_row(r.signs || K != Kp ? t : row, Kp, r, out, m);
    }
    delete[] heap;
}

// --- norms ------------------------------------------------------------------------------------------------------------------

static inline float inverse_rms(V16 squares, int64_t n, float eps) { return 1.0f / __builtin_sqrtf(vsum(squares) / (float)n + eps); }

static void rms_norm(const Mat& x, int64_t m0, int64_t m1, const float* weight, float eps, const Mat& out) {
    const int64_t n = x.cols, whole = n & ~int64_t(15), tail = n - whole;
    for (int64_t m = m0; m < m1; m++) {
        const float* row = x.data + m * x.stride;
        float* y = out.data + m * out.stride;
        V16 s = vzero();
        for (int64_t k = 0; k < whole; k += 16) { V16 v = vload(row + k); s = vfma(v, v, s); }
        if (tail) { V16 v = vload_part(row + whole, tail); s = vfma(v, v, s); }
        const V16 r = vset(inverse_rms(s, n, eps));
        for (int64_t k = 0; k < whole; k += 16) vstore(y + k, vmul(vmul(vload(row + k), r), vload(weight + k)));
        if (tail) vstore_part(y + whole, vmul(vmul(vload_part(row + whole, tail), r), vload_part(weight + whole, tail)), tail);
    }
}

// RMSNorm over each run of `dim` columns with one shared weight (query and key norms), in place.
static void head_norm(const Mat& x, int64_t m0, int64_t m1, int64_t dim, const float* weight, float eps) {
    for (int64_t m = m0; m < m1; m++)
        for (int64_t c = 0; c + dim <= x.cols; c += dim) {
            const Mat head = {x.data + m * x.stride + c, 1, dim, dim};
            rms_norm(head, 0, 1, weight, eps, head);
        }
}

// --- rotary embedding: table row = cos[count], sin[count] -------------------------------------------------------------------

static void rope_table(const int32_t* positions, int64_t m0, int64_t m1, const double* inv_freq, int64_t count, float magnitude, float* out, int64_t stride) {
    for (int64_t m = m0; m < m1; m++)
        for (int64_t i = 0; i < count; i++) {
            double s, c;
            sin_cos((double)positions[m] * inv_freq[i], &s, &c);
            out[m * stride + i] = (float)c * magnitude;
            out[m * stride + count + i] = (float)s * magnitude;
        }
}

static void rope(const Mat& x, int64_t m0, int64_t m1, int64_t dim, int64_t rotated, RopePairs pairs, const float* table, int64_t stride) {
    const int64_t half = rotated / 2;
    for (int64_t m = m0; m < m1; m++) {
        const float *c = table + m * stride, *s = c + half;
        for (int64_t h = 0; h + dim <= x.cols; h += dim) {
            float* p = x.data + m * x.stride + h;
            if (pairs == RopePairs::halves) {
                int64_t i = 0;
                for (; i + 16 <= half; i += 16) {
                    V16 a = vload(p + i), b = vload(p + half + i), vc = vload(c + i), vs = vload(s + i);
                    vstore(p + i, vfma(a, vc, vsub(vzero(), vmul(b, vs))));
                    vstore(p + half + i, vfma(a, vs, vmul(b, vc)));
                }
                for (; i < half; i++) {
                    float a = p[i], b = p[half + i], bs = b * s[i], bc = b * c[i];
                    p[i] = __builtin_fmaf(a, c[i], 0.0f - bs);
                    p[half + i] = __builtin_fmaf(a, s[i], bc);
                }
            } else {
                for (int64_t i = 0; i < half; i++) {
                    float a = p[2 * i], b = p[2 * i + 1], bs = b * s[i], bc = b * c[i];
                    p[2 * i] = __builtin_fmaf(a, c[i], 0.0f - bs);
                    p[2 * i + 1] = __builtin_fmaf(a, s[i], bc);
                }
            }
        }
    }
}

// --- element-wise; rows are padded to 64 with zeros, which all of these keep ------------------------------------------------

static void gate(Gate kind, const Mat& g, const Mat& u, int64_t m0, int64_t m1, const Mat& out) {
    const V16 one = vset(1.0f);
    for (int64_t m = m0; m < m1; m++) {
        const float *pg = g.data + m * g.stride, *pu = u.data + m * u.stride;
        float* po = out.data + m * out.stride;
        for (int64_t k = 0; k < g.cols; k += 16) {
            V16 x = vload(pg + k), z;
            if (kind == Gate::silu) z = vsub(vzero(), x);
            else {  // 0.5 x (1 + tanh(t)) = x / (1 + e^-2t), t = sqrt(2/pi) (x + 0.044715 x^3)
                V16 cube = vmul(vmul(x, x), x);
                z = vmul(vfma(cube, vset(0.044715f), x), vset(-1.5957691216057308f));
            }
            vstore(po + k, vmul(vdiv(x, vadd(one, vexp(z))), vload(pu + k)));
        }
    }
}

static void add(const Mat& a, const Mat& b, int64_t m0, int64_t m1, const Mat& out) {
    for (int64_t m = m0; m < m1; m++)
        for (int64_t k = 0; k < a.cols; k += 16)
            vstore(out.data + m * out.stride + k, vadd(vload(a.data + m * a.stride + k), vload(b.data + m * b.stride + k)));
}

static void scale(const Mat& x, int64_t m0, int64_t m1, float factor) {
    for (int64_t m = m0; m < m1; m++) scale_row(x.data + m * x.stride, factor, x.cols);
}

static void softcap(const Mat& x, int64_t m0, int64_t m1, float cap) {
    const V16 c = vset(cap);
    for (int64_t m = m0; m < m1; m++)
        for (int64_t k = 0; k < x.cols; k += 16) {
            float* p = x.data + m * x.stride + k;
            vstore(p, vmul(c, vtanh(vdiv(vload(p), c))));
        }
}

// --- sampling ---------------------------------------------------------------------------------------------------------------

static void softmax(const float* x, int64_t n, float inv_temperature, float* out) {
    float top = x[0];
    for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    const V16 t = vset(top), f = vset(inv_temperature);
    V16 sum = vzero();
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t left = n - i;
        V16 e = vexp(vmul(vsub(left >= 16 ? vload(x + i) : vload_part(x + i, left), t), f));
        if (left >= 16) vstore(out + i, e);
        else { vstore_part(out + i, e, left); e = vload_part(out + i, left); }
        sum = vadd(sum, e);
    }
    const float total = vsum(sum);
    for (int64_t i = 0; i < n; i++) out[i] = out[i] / total;
}

// Mixture of experts: scores of a router, rows of experts added up, a shared expert's gate. Short convolutions. Included
// inside an ISA's namespace, after its rows.

static void sigmoid(const float* x, int64_t n, float* out) {
    const V16 one = vset(1.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t left = n - i;
        const V16 y = vdiv(one, vadd(one, vexp(vsub(vzero(), left >= 16 ? vload(x + i) : vload_part(x + i, left)))));
        if (left >= 16) vstore(out + i, y);
        else vstore_part(out + i, y, left);
    }
}

static void weighted_sum(const Mat& y, const int32_t* places, const float* weights, int64_t count, int64_t m0, int64_t m1, const Mat& out) {
    for (int64_t m = m0; m < m1; m++) {
        const int32_t* at = places + m * count;
        const float* w = weights + m * count;
        for (int64_t c = 0; c < out.cols; c += 16) {
            V16 sum = vzero();
            for (int64_t i = 0; i < count; i++) sum = vfma(vset(w[i]), vload(y.data + at[i] * y.stride + c), sum);
            vstore(out.data + m * out.stride + c, sum);
        }
    }
}

// y times the sigmoid of x . weight, row by row.
static void gate_rows(const Mat& x, const float* weight, const Mat& y, int64_t m0, int64_t m1) {
    const int64_t n = x.cols, whole = n & ~int64_t(15), tail = n - whole;
    for (int64_t m = m0; m < m1; m++) {
        const float* row = x.data + m * x.stride;
        V16 s = vzero();
        for (int64_t k = 0; k < whole; k += 16) s = vfma(vload(row + k), vload(weight + k), s);
        if (tail) s = vfma(vload_part(row + whole, tail), vload_part(weight + whole, tail), s);
        const float dot = vsum(s);
        float open;
        sigmoid(&dot, 1, &open);
        scale_row(y.data + m * y.stride, open, y.cols);
    }
}

// --- short convolutions: rows are [b | c | x], what is kept of a position is b * x -----------------------------------------

static inline V16 load_kept(const ConvLayer& layer, int64_t slot, int64_t k) {
    const int64_t at = slot * layer.stride + k;
    return layer.half ? vload_half((const uint16_t*)layer.inputs + at) : vload((const float*)layer.inputs + at);
}

static void conv_append(const ConvLayer& layer, const Mat& bcx, const int32_t* slots, int64_t m0, int64_t m1) {
    const int64_t width = layer.width;
    for (int64_t m = m0; m < m1; m++) {
        const float* row = bcx.data + m * bcx.stride;
        for (int64_t k = 0; k < width; k += 16) {   // the stride of what is kept is a multiple of 16
            const int64_t left = width - k, at = slots[m] * layer.stride + k;
            const V16 v = left >= 16 ? vmul(vload(row + k), vload(row + 2 * width + k)) : vmul(vload_part(row + k, left), vload_part(row + 2 * width + k, left));
            if (layer.half) vstore_half((uint16_t*)layer.inputs + at, v);
            else vstore((float*)layer.inputs + at, v);
        }
    }
}

// One row: c times the sum over taps ascending, fma from 0, of tap x input; a slot of -1 lies before the text.
static void short_conv(const ConvLayer& layer, const float* bcx, const Mat& taps, const int32_t* slots, float* out) {
    const int64_t width = layer.width;
    const float* c = bcx + width;
    for (int64_t k = 0; k < width; k += 16) {
        const int64_t left = width - k;
        V16 sum = vzero();
        for (int64_t t = 0; t < taps.rows; t++)
            if (slots[t] >= 0) sum = vfma(vload(taps.data + t * taps.stride + k), load_kept(layer, slots[t], k), sum);
        if (left >= 16) vstore(out + k, vmul(vload(c + k), sum));
        else vstore_part(out + k, vmul(vload_part(c + k, left), sum), left);
    }
}

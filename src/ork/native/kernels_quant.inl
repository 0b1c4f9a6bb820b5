// Weights to codes and scales, with a search for the scale. Included inside an ISA's namespace.
//
// A row is first scaled by the power of two that brings its absmax into [1, 2): every size of weight then takes the same
// course. `top` is the level that absmax becomes; a level is found from t = value / scale.

struct QuantI8 {
    static constexpr float top = 127.0f;
    static V16 level(V16 t) { return vfloat(vround(vmin(vmax(t, vset(-127.0f)), vset(127.0f)))); }
    static I16 code(V16 t) { return vround(vmin(vmax(t, vset(-127.0f)), vset(127.0f))); }
};

struct QuantI4 {
    static constexpr float top = 7.0f;
    static V16 level(V16 t) { return vfloat(vround(vmin(vmax(t, vset(-7.0f)), vset(7.0f)))); }
    static I16 code(V16 t) { return vround(vmin(vmax(t, vset(-7.0f)), vset(7.0f))); }
};

// The nearest of the 16 levels, the upper one half-way: steps taken for every middle that t has reached.
struct QuantNf4 {
    static constexpr float top = 127.0f;
    static float middle(int i) { return 0.5f * (float)(NF4_LEVELS[i] + NF4_LEVELS[i + 1]); }
    static V16 level(V16 t) {
        V16 v = vset((float)NF4_LEVELS[0]);
        for (int i = 0; i < 15; i++) v = vless_select(t, vset(middle(i)), v, vset((float)NF4_LEVELS[i + 1]));
        return v;
    }
    static I16 code(V16 t) {
        V16 v = vzero();
        for (int i = 0; i < 15; i++) v = vless_select(t, vset(middle(i)), v, vset((float)(i + 1)));
        return vround(v);
    }
};

static inline float reciprocal(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }   // of a zero scale: every level is 0

template <class Q> static float squared_error(const float* y, const float* weight, int64_t n, float scale) {
    const V16 inv = vset(reciprocal(scale)), minus = vset(-scale);
    V16 sum = vzero();
    for (int64_t k = 0; k < n; k += 16) {
        const V16 v = vload(y + k), d = vfma(minus, Q::level(vmul(v, inv)), v);
        sum = vfma(weight ? vmul(vload(weight + k), d) : d, d, sum);
    }
    return vsum(sum);
}

// The best scale for the codes that `scale` leads to; `scale` itself if they are all zero.
template <class Q> static float least_squares(const float* y, const float* weight, int64_t n, float scale) {
    const V16 inv = vset(reciprocal(scale));
    V16 products = vzero(), squares = vzero();
    for (int64_t k = 0; k < n; k += 16) {
        const V16 v = vload(y + k), level = Q::level(vmul(v, inv)), weighted = weight ? vmul(vload(weight + k), level) : level;
        products = vfma(weighted, v, products);
        squares = vfma(weighted, level, squares);
    }
    const float s = vsum(squares);
    return s > 0.0f ? vsum(products) / s : scale;
}

static inline float absolute_max(const float* y, int64_t n) {
    I16 top = iset(0);
    for (int64_t k = 0; k < n; k += 16) top = imax_unsigned(top, vabs_bits(vload(y + k)));
    const uint32_t bits = imax_unsigned_lanes(top);
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

static inline uint16_t to_half(float x) { uint16_t h[16]; vstore_half(h, vset(x)); return h[0]; }
static inline float from_half(uint16_t h) { uint16_t x[16]; float y[16]; for (auto& v : x) v = h; vstore(y, vload_half(x)); return y[0]; }

// The scale of y [n] (n a multiple of 16, zeros beyond the data) as it will be stored: half(scale * unit) / unit, or f32 if unit is 0.
template <class Q> static float search_scale(const QuantWeights& q, const float* y, const float* weight, int64_t n, float unit) {
    const auto stored = [&](float s) { return unit == 0.0f ? s : from_half(to_half(s * unit)) / unit; };
    const float base = absolute_max(y, n) / Q::top;
    float best = stored(base);
    if (best == 0.0f || q.ratio_count == 0) return best;
    float least = squared_error<Q>(y, weight, n, best);
    const auto attempt = [&](float s) {
        s = stored(s);
        const float e = squared_error<Q>(y, weight, n, s);
        if (!(e < least)) return false;
        best = s, least = e;
        return true;
    };
    for (int64_t i = 0; i < q.ratio_count; i++) attempt(base * q.ratios[i]);
    for (int i = 0; i < q.refine && attempt(least_squares<Q>(y, weight, n, best)); i++) {}
    return best;
}

template <class Q> static void encode_row(const QuantWeights& q, const float* y, float scale_of_row, int8_t* codes, float* channel, uint16_t* groups) {
    const float unit = (float)(int64_t(1) << q.headroom);
    const int64_t size = q.group ? q.group : (q.K + 15) / 16 * 16;
    for (int64_t g = 0, k0 = 0; k0 < q.K; g++, k0 += size) {
        const float scale = search_scale<Q>(q, y + k0, q.weight ? q.weight + k0 : nullptr, size, q.group ? unit : 0.0f);
        const V16 inv = vset(reciprocal(scale));
        for (int64_t k = k0; k < k0 + size; k += 16) istore_i8(codes + k, Q::code(vmul(vload(y + k), inv)));
        if (q.group) groups[g] = to_half(scale * unit);
        else *channel = scale * scale_of_row;
    }
    if (q.group) *channel = scale_of_row / unit;
    for (int64_t k = q.K; k < q.Kp; k++) codes[k] = 0;
}

// -1, or the first row that holds a value that is not finite. Codes [n][Kp], channel [n], groups [n][K / group].
static int64_t quantise_weights(const QuantWeights& q, const float* rows, int64_t n, int8_t* codes, float* channel, uint16_t* groups) {
    const int64_t whole = (q.K + 15) / 16 * 16;
    float* y = new float[whole];
    int64_t bad = -1;
    for (int64_t i = 0; i < n && bad < 0; i++) {
        const float* row = rows + i * q.K;
        uint32_t top = 0;
        for (int64_t k = 0; k < whole; k++) y[k] = k < q.K ? row[k] : 0.0f;
        const float peak = absolute_max(y, whole);
        __builtin_memcpy(&top, &peak, 4);
        if (top >= 0x7f800000u) { bad = i; break; }
        const int exponent = (int)(top >> 23) - 127;
        float power = 0.0f, inverse = 0.0f;   // a row of nothing from 2^-100 on is zero
        if (exponent >= -100) {
            power = __builtin_ldexpf(1.0f, exponent);
            inverse = __builtin_ldexpf(1.0f, -exponent);
        }
        for (int64_t k = 0; k < whole; k += 16) vstore(y + k, vmul(vload(y + k), vset(inverse)));
        uint16_t* own_groups = q.group ? groups + i * (q.K / q.group) : nullptr;
        switch (q.codec) {
            case Codec::i4: encode_row<QuantI4>(q, y, power, codes + i * q.Kp, channel + i, own_groups); break;
            case Codec::nf4: encode_row<QuantNf4>(q, y, power, codes + i * q.Kp, channel + i, own_groups); break;
            default: encode_row<QuantI8>(q, y, power, codes + i * q.Kp, channel + i, own_groups);
        }
    }
    delete[] y;
    return bad;
}

// How likely a model found what came next: the largest logit of a row, and sums of exponentials in double precision.
// Element i belongs to lane i mod 16; lanes are doubles, added in the fixed tree: the same sums on every instruction set.

typedef float F8 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));
struct D16 { D8 low, high; };

static inline D16 dwide(V16 a) {
    float t[16];
    F8 low, high;
    vstore(t, a);
    std::memcpy(&low, t, 32);
    std::memcpy(&high, t + 8, 32);
    return {__builtin_convertvector(low, D8), __builtin_convertvector(high, D8)};
}
static inline double dsum(D16 a) {
    double t[8];
    const D8 s = a.low + a.high;
    std::memcpy(t, &s, 64);
    for (int h = 4; h; h >>= 1) for (int i = 0; i < h; i++) t[i] = t[i] + t[i + h];
    return t[0];
}

// The largest of n values and the first index that holds it. NaN is smaller than everything; all of them NaN: index 0.
void top(const float* x, int64_t n, float* largest, int64_t* index) {
    constexpr int64_t BLOCK = 4096;   // only the block with the largest is searched for it
    float best = -__builtin_inff();
    int64_t at = 0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = b + BLOCK < n ? b + BLOCK : n;
        V16 m = vset(-__builtin_inff());
        int64_t i = b;
        for (; i + 16 <= end; i += 16) m = vmax(vload(x + i), m);
        float held = vmax_lanes(m);
        for (; i < end; i++) held = x[i] > held ? x[i] : held;
        if (held > best) { best = held; at = b; }
    }
    while (at < n - 1 && x[at] != best) at++;
    *largest = best;
    *index = x[at] == best ? at : 0;
}

// sums[0] = sum of e^(p - shift) over n logits; with q also sums[1] = sum of e^(p - shift) * (p - q).
void exp_sums(const float* p, const float* q, int64_t n, float shift, double* sums) {
    const V16 s = vset(shift);
    D16 total = {}, weighted = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const V16 x = vload(p + i);
        const D16 e = dwide(vexp(vsub(x, s)));
        total.low += e.low;
        total.high += e.high;
        if (!q) continue;
        const D16 d = dwide(vsub(x, vload(q + i)));
        weighted.low += e.low * d.low;
        weighted.high += e.high * d.high;
    }
    if (i < n) {   // beyond the end e^-inf = 0, and 0 - 0
        float t[16];
        for (int64_t j = 0; j < 16; j++) t[j] = i + j < n ? p[i + j] : -__builtin_inff();
        const D16 e = dwide(vexp(vsub(vload(t), s)));
        total.low += e.low;
        total.high += e.high;
        if (q) {
            const D16 d = dwide(vsub(vload_part(p + i, n - i), vload_part(q + i, n - i)));
            weighted.low += e.low * d.low;
            weighted.high += e.high * d.high;
        }
    }
    sums[0] = dsum(total);
    if (q) sums[1] = dsum(weighted);
}

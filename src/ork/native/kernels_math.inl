// exp, tanh, sin and cos of our own: the same bits on every instruction set. Included inside an ISA's namespace.

// e^x: range reduction by ln 2 in two parts, degree-6 polynomial; below -87 the result is 0, above 88 it is held there.
// NaN passes through (the operands' order in the clamps sees to it).
static inline V16 vexp(V16 x) {
    const V16 low = vset(-87.0f);
    V16 t = vmax(low, vmin(vset(88.0f), x));
    I16 n = vround(vmul(t, vset(1.44269504f)));
    V16 f = vfloat(n);
    V16 r = vfma(f, vset(-0.693145752f), t);
    r = vfma(f, vset(-1.42860677e-6f), r);
    V16 p = vset(1.38888889e-3f);
    p = vfma(p, r, vset(8.33333377e-3f));
    p = vfma(p, r, vset(4.16666679e-2f));
    p = vfma(p, r, vset(0.166666672f));
    p = vfma(p, r, vset(0.5f));
    p = vfma(p, r, vset(1.0f));
    p = vfma(p, r, vset(1.0f));
    return vless_select(x, low, vzero(), vmul(p, vexp2i(n)));
}

// tanh x: odd polynomial (Cephes' coefficients) below 0.625, else 1 - 2 / (e^2|x| + 1).
static inline V16 vtanh(V16 x) {
    V16 neg = vsub(vzero(), x), a = vmax(x, neg), z = vmul(x, x);
    V16 p = vset(-5.70498872745e-3f);
    p = vfma(p, z, vset(2.06390887954e-2f));
    p = vfma(p, z, vset(-5.37397155531e-2f));
    p = vfma(p, z, vset(1.33314422036e-1f));
    p = vfma(p, z, vset(-3.33332819422e-1f));
    V16 small = vfma(vmul(p, z), x, x);
    V16 big = vsub(vset(1.0f), vdiv(vset(2.0f), vadd(vexp(vadd(a, a)), vset(1.0f))));
    big = vless_select(x, vzero(), vsub(vzero(), big), big);
    return vless_select(a, vset(0.625f), small, big);
}

// sin and cos of a double by quadrant (Cody-Waite with pi/2 in three parts, good to 2^20 turns), Taylor-like minimax.
static inline void sin_cos(double x, double* s, double* c) {
    double q = x * 0.63661977236758134308;
    int64_t n = (int64_t)(q < 0 ? q - 0.5 : q + 0.5);
    double f = (double)n;
    double r = x - f * 1.57079632673412561417e+00;
    r = r - f * 6.07710050630396597660e-11;
    r = r - f * 2.02226624879595063154e-21;
    double z = r * r;
    double ps = r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 +
                z * (2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
    double pc = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 +
                z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
    switch (n & 3) {
        case 0: *s = ps; *c = pc; break;
        case 1: *s = pc; *c = -ps; break;
        case 2: *s = -ps; *c = -pc; break;
        default: *s = -pc; *c = ps;
    }
}

static inline V16 vload_part(const float* p, int64_t n) {  // the first n lanes, the rest zero
    float t[16] = {};
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    return vload(t);
}
static inline void vstore_part(float* p, V16 a, int64_t n) {
    float t[16];
    vstore(t, a);
    for (int64_t i = 0; i < n; i++) p[i] = t[i];
}

// What the processor can do at most: the yardstick of bench/kernels.py. Included inside an ISA's namespace.

static int64_t float_peak(int64_t iterations) {
    V16 a[PEAK_CHAINS];
    for (int i = 0; i < PEAK_CHAINS; i++) a[i] = vset((float)i);
    const V16 m = vset(0.5f);
    for (int64_t k = 0; k < iterations; k++)
#pragma GCC unroll 16
        for (int i = 0; i < PEAK_CHAINS; i++) a[i] = vfma(a[i], m, m);
    V16 s = a[0];
    for (int i = 1; i < PEAK_CHAINS; i++) s = vadd(s, a[i]);
    volatile float keep = vsum(s);
    (void)keep;
    return iterations * PEAK_CHAINS * 16;
}

static int32_t read_memory(const void* p, int64_t bytes) {
    const int32_t* q = (const int32_t*)p;
    I16 a = iset(0), b = a, c = a, d = a;
    for (int64_t i = 0; i + 64 <= bytes / 4; i += 64) {
        a = iadd(a, iload(q + i)); b = iadd(b, iload(q + i + 16));
        c = iadd(c, iload(q + i + 32)); d = iadd(d, iload(q + i + 48));
    }
    return isum(iadd(iadd(a, b), iadd(c, d)));
}

/* What the chip computes, against loops of the CPU. */
#include "tests.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *node = "/dev/dri/card1";
uint32_t broken_at, broken_value;

void maybe_break(struct registers *r) {
    if (broken_at) set(r, broken_at, broken_value);
}

static void run_with(int flags, int npu, struct registers *programs, int count, uint32_t enable, int core, int domain) {
    for (int i = 0; i < count; i++) maybe_break(&programs[i]);
    struct chain chain = chain_make(npu, programs, count, enable, domain);
    int error = chain_submit(npu, &chain, flags, core, domain, 6000);
    if (error) {
        errno = error;
        fail("SUBMIT");
    }
    chain_free(npu, &chain);
}

static void run(int npu, struct registers *programs, int count, uint32_t enable, int core, int domain) {
    run_with(BLOCK, npu, programs, count, enable, core, domain);
}

int value(int i, int j, int low, int high) {
    uint32_t x = i * 2654435761u + j * 40503u + 12345;
    x = (x ^ x >> 15) * 2246822519u;
    return low + (int)((x ^ x >> 13) % (uint32_t)(high - low + 1));
}

static uint16_t half(int n) {  /* exact for |n| <= 2048 */
    if (!n) return 0;
    uint32_t sign = n < 0 ? 0x8000 : 0, m = n < 0 ? -n : n, e = 25;
    while (!(m & 0x400)) m <<= 1, e--;
    return sign | e << 10 | (m & 0x3ff);
}

int differs(const char *what, int i, int j, double got, double want) {
    if (got == want) return 0;
    fprintf(stderr, "client: %s: [%d][%d] is %g, not %g\n", what, i, j, got, want);
    return 1;
}

int product(int i, int j, int K, int low, int high) {
    int sum = 0;
    for (int k = 0; k < K; k++) sum += value(i, k, low, high) * value(k + 1000, j, low, high);
    return sum;
}

/* --- matmuls: one program, or one a row for int4 --- */

size_t kernel_at(int k, int n, int K, int group) {  /* in elements: [N/G][K/32][G][32] */
    return (size_t)(n / group) * group * K + (size_t)(k / 32) * group * 32 + (n % group) * 32 + k % 32;
}

int any_matmul(int npu, enum kind kind, int M, int K, int N, uint32_t flags, int core, int domain) {
    int low = kind == INT4 ? -8 : kind == FP16 ? -9 : -128, high = kind == INT4 ? 7 : kind == FP16 ? 9 : 127;
    int bits = kind == INT4 ? 4 : kind == FP16 ? 16 : 8, group = kind == INT4 ? 64 : kind == FP16 ? 16 : 32;
    struct buffer a = buffer_make(npu, (size_t)M * K * bits / 8, flags, domain);
    struct buffer b = buffer_make(npu, (size_t)K * N * bits / 8, flags, domain);
    struct buffer c = buffer_make(npu, (size_t)M * N * 4, flags, domain);
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++) {
            int v = value(m, k, low, high);
            if (kind == INT8) ((int8_t *)a.data)[m * K + k] = v;
            if (kind == FP16) ((uint16_t *)a.data)[m * K + k] = half(v);
            if (kind == INT4) ((uint8_t *)a.data)[(m * K + k) / 2] |= (v & 15) << 4 * (k & 1);
        }
    for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) {
            int v = value(k + 1000, n, low, high);
            size_t at = kernel_at(k, n, K, group);
            if (kind == INT8) ((int8_t *)b.data)[at] = v;
            if (kind == FP16) ((uint16_t *)b.data)[at] = half(v);
            if (kind == INT4) ((uint8_t *)b.data)[at / 2] |= (v & 15) << 4 * (at & 1);
        }
    buffer_sync(npu, &a, TO_DEVICE);
    buffer_sync(npu, &b, TO_DEVICE);
    buffer_sync(npu, &c, TO_DEVICE);
    struct registers programs[64];
    int count = kind == INT4 ? M : 1;
    for (int i = 0; i < count; i++) {
        programs[i] = matmul(kind, kind == INT4 ? 1 : M, K, N);
        operands(&programs[i], &a, kind == INT4 ? (size_t)i * K / 2 : 0, &b, &c, kind == INT4 ? (size_t)i * N * 2 : 0);
    }
    run(npu, programs, count, 0xd, core, domain);
    buffer_sync(npu, &c, FROM_DEVICE);
    int wrong = 0;
    for (int m = 0; m < M && !wrong; m++)
        for (int n = 0; n < N && !wrong; n++) {
            size_t at = (size_t)m * N + n;
            double got = kind == INT8   ? ((int32_t *)c.data)[at]
                         : kind == FP16 ? ((float *)c.data)[at]
                                        : ((int16_t *)c.data)[at];
            wrong = differs("matmul", m, n, got, product(m, n, K, low, high));
        }
    buffer_free(npu, &a);
    buffer_free(npu, &b);
    buffer_free(npu, &c);
    return wrong;
}

static int simple(enum kind kind, int M, int K, int N, uint32_t flags) {
    int npu = npu_open(node), wrong = any_matmul(npu, kind, M, K, N, flags, 0, 0);
    close(npu);
    return wrong;
}

int test_int8(void) { return simple(INT8, 33, 96, 160, CACHED); }
int test_fp16(void) { return simple(FP16, 16, 64, 48, CACHED); }
int test_int4(void) { return simple(INT4, 3, 128, 64, CACHED); }
int test_uncached(void) { return simple(INT8, 4, 32, 32, UNCACHED); }

/* --- a convolution of cubes, 16 bytes of channels a pixel --- */

int test_conv(void) {
    enum { C = 32, H = 6, W = 9, N = 64, k = 3 };
    int npu = npu_open(node);
    struct buffer a = buffer_make(npu, C * H * W, CACHED, 0), b = buffer_make(npu, k * k * C * N, CACHED, 0);
    struct buffer c = buffer_make(npu, N * H * W * 4, CACHED, 0);
    for (int ch = 0; ch < C; ch++)
        for (int p = 0; p < H * W; p++)
            ((int8_t *)a.data)[(ch / 16 * H * W + p) * 16 + ch % 16] = value(ch, p, -128, 127);
    for (int n = 0; n < N; n++)  /* [N/32][C/32][k][k][32][32] */
        for (int t = 0; t < k * k; t++)
            for (int ch = 0; ch < C; ch++)
                ((int8_t *)b.data)[n / 32 * 32 * k * k * C + (t * 32 + n % 32) * 32 + ch] =
                    value(n + 500, t * C + ch, -128, 127);
    buffer_sync(npu, &a, TO_DEVICE);
    buffer_sync(npu, &b, TO_DEVICE);
    buffer_sync(npu, &c, TO_DEVICE);
    struct registers r = convolution(C, H, W, N, k);
    operands(&r, &a, 0, &b, &c, 0);
    run(npu, &r, 1, 0xd, 0, 0);
    buffer_sync(npu, &c, FROM_DEVICE);
    for (int n = 0; n < N; n++)
        for (int y = 0; y < H; y++)
            for (int x = 0; x < W; x++) {
                int sum = 0;
                for (int t = 0; t < k * k; t++) {
                    int yy = y + t / k - 1, xx = x + t % k - 1;
                    if (yy < 0 || yy >= H || xx < 0 || xx >= W) continue;
                    for (int ch = 0; ch < C; ch++)
                        sum += value(ch, yy * W + xx, -128, 127) * value(n + 500, t * C + ch, -128, 127);
                }
                int got = ((int32_t *)c.data)[(n / 4 * H * W + y * W + x) * 4 + n % 4];
                if (differs("convolution", n, y * W + x, got, sum)) return 1;
            }
    close(npu);
    return 0;
}

/* --- the DPU and the PPU alone, on fp16 cubes of 8 channels --- */

static float single(uint16_t h) {
    int e = h >> 10 & 31, m = h & 0x3ff;
    float v = e ? ldexpf(1 + m / 1024.f, e - 15) : ldexpf(m / 1024.f, -14);
    return h & 0x8000 ? -v : v;
}

static size_t cube_at(int pixel, int channel, int pixels) {
    return ((size_t)(channel / 8) * pixels + pixel) * 8 + channel % 8;
}

static struct buffer cube_make(int npu, int pixels, int channels, int seed, int divisor) {
    struct buffer made = buffer_make(npu, (size_t)pixels * channels * 2, CACHED, 0);
    for (int p = 0; seed && p < pixels; p++)
        for (int c = 0; c < channels; c++) {
            uint16_t h = half(value(p + seed, c, -512, 511));
            ((uint16_t *)made.data)[cube_at(p, c, pixels)] = h & 0x7fff ? h - (divisor << 10) : h;  /* / 2^divisor */
        }
    buffer_sync(npu, &made, TO_DEVICE);
    return made;
}

static double cube_value(int p, int c, int seed, int divisor) { return ldexp(value(p + seed, c, -512, 511), -divisor); }

int test_add(void) {
    enum { M = 20, N = 48 };
    int npu = npu_open(node);
    struct buffer a = cube_make(npu, M, N, 1, 0), b = cube_make(npu, M, N, 100, 0), c = cube_make(npu, M, N, 0, 0);
    struct registers r = addition(M, N, &b);
    set(&r, 0x5018, (uint32_t)a.address);
    set(&r, 0x4020, (uint32_t)c.address);
    run(npu, &r, 1, 0x18, 0, 0);
    buffer_sync(npu, &c, FROM_DEVICE);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            if (differs("addition", m, n, single(((uint16_t *)c.data)[cube_at(m, n, M)]),
                        cube_value(m, n, 1, 0) + cube_value(m, n, 100, 0)))
                return 1;
    return 0;
}

int test_pool(void) {
    enum { C = 16, H = 6, W = 10, k = 2 };
    int npu = npu_open(node);
    struct buffer a = cube_make(npu, H * W, C, 1, 0), c = cube_make(npu, H / k * (W / k), C, 0, 0);
    struct registers r = max_pool(C, H, W, k);
    set(&r, 0x701c, (uint32_t)a.address);
    set(&r, 0x6070, (uint32_t)c.address);
    run(npu, &r, 1, 0x60, 0, 0);
    buffer_sync(npu, &c, FROM_DEVICE);
    for (int ch = 0; ch < C; ch++)
        for (int y = 0; y < H / k; y++)
            for (int x = 0; x < W / k; x++) {
                double most = -1e9;
                for (int t = 0; t < k * k; t++) {
                    double v = cube_value((y * k + t / k) * W + x * k + t % k, ch, 1, 0);
                    if (v > most) most = v;
                }
                size_t at = cube_at(y * (W / k) + x, ch, H / k * (W / k));
                if (differs("maximum", ch, y * (W / k) + x, single(((uint16_t *)c.data)[at]), most)) return 1;
            }
    return 0;
}

/* Tables over [-8, 8): the index is 2048 x, values are in units of 2^-12. */
int test_silu(void) {
    enum { M = 12, N = 16 };
    int16_t low[513], high[513];
    int npu = npu_open(node);
    struct buffer a = cube_make(npu, M, N, 1, 6), c = cube_make(npu, M, N, 0, 0), scratch = cube_make(npu, 1, 8, 0, 0);
    for (int i = 0; i <= 512; i++) {
        double x = i / 64.0 - 8, v = (x + 8) / (1 + exp(-(x + 8))) * 4096;
        low[i] = (int16_t)lrint(x / (1 + exp(-x)) * 4096);
        high[i] = (int16_t)(v > 32767 ? 32767 : lrint(v));
    }
    struct registers load = table_load(low, high), look = table_lookup(M, N, 0x6800, 12);
    set(&load, 0x5018, (uint32_t)scratch.address);
    set(&load, 0x4020, (uint32_t)scratch.address);
    set(&look, 0x5018, (uint32_t)a.address);
    set(&look, 0x4020, (uint32_t)c.address);
    run_with(1, npu, &load, 1, 0x18, 0, 0);  /* without ping-pong, or the table is read half written */
    run_with(1, npu, &look, 1, 0x18, 0, 0);
    buffer_sync(npu, &c, FROM_DEVICE);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            double x = cube_value(m, n, 1, 6), want = x / (1 + exp(-x));
            double got = single(((uint16_t *)c.data)[cube_at(m, n, M)]);
            if (fabs(got - want) > 2e-3 + fabs(want) * 1e-3) return differs("silu", m, n, got, want);
        }
    return 0;
}

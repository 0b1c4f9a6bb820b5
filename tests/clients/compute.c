/* What the chip computes, against loops of the CPU. */
#include "tests.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *node = "/dev/dri/card1";
uint32_t broken_at, broken_value;

void maybe_break(struct registers *r) {
    if (broken_at) set(r, broken_at, broken_value);
}

static void run(int npu, struct registers *programs, int count, uint32_t enable, int core, int domain) {
    for (int i = 0; i < count; i++) maybe_break(&programs[i]);
    struct chain chain = chain_make(npu, programs, count, enable, domain);
    int error = chain_submit(npu, &chain, BLOCK, core, domain, 6000);
    if (error) {
        errno = error;
        fail("SUBMIT");
    }
    chain_free(npu, &chain);
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
        for (int p = 0; p < H * W; p++) ((int8_t *)a.data)[(ch / 16 * H * W + p) * 16 + ch % 16] = value(ch, p, -128, 127);
    for (int n = 0; n < N; n++)  /* [N/32][C/32][k][k][32][32] */
        for (int t = 0; t < k * k; t++)
            for (int ch = 0; ch < C; ch++)
                ((int8_t *)b.data)[n / 32 * 32 * k * k * C + (t * 32 + n % 32) * 32 + ch] = value(n + 500, t * C + ch, -128, 127);
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
                if (differs("convolution", n, y * W + x, ((int32_t *)c.data)[(n / 4 * H * W + y * W + x) * 4 + n % 4], sum))
                    return 1;
            }
    close(npu);
    return 0;
}

/* Register programs, from the tables of the chip's manual and of published captures. Addresses are the caller's. */
#ifndef PROGRAMS_H
#define PROGRAMS_H

#include "npu.h"

enum kind { INT8, FP16, INT4 };

/* C[M, N] = A[M, K] x B[K, N]; rows are dense. int8 -> int32, fp16 -> fp32; int4 -> int16, and M is 1. */
struct registers matmul(enum kind kind, int M, int K, int N);
void operands(struct registers *registers, const struct buffer *a, size_t a_at, const struct buffer *b,
              const struct buffer *c, size_t c_at);
/* int8 -> int32 convolution, kernel k x k, stride 1, padded to the input's size, of cubes. */
struct registers convolution(int C, int H, int W, int N, int k);
/* Of the DPU alone (op-enable 0x18), on fp16 cubes of M rows and N channels: data goes through unchanged, ... */
struct registers through(int M, int N);
/* ... b is added, ... */
struct registers addition(int M, int N, const struct buffer *b);
/* ... 513 + 513 values are loaded for inputs from -16384 to 16384, in steps of 32, or looked up. */
struct registers table_load(const int16_t low[513], const int16_t high[513]);
struct registers table_lookup(int M, int N, uint16_t multiplier, int minus_exponent);
/* Of the PPU (0x60): maximum over k x k, stride k, of an fp16 cube. */
struct registers max_pool(int C, int H, int W, int k);

#endif

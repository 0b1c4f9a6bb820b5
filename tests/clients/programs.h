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

#endif

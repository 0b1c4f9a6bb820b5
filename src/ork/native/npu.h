// What the host does beside an NPU: weights tiled anew for its programs, int4 rows packed, its sums scaled.
#pragma once
#include <cstdint>
#include "kernels.h"

namespace ork {

// A slice's codes [Kp/ks][n/G][ks/32][G][32] with K slices of `run` instead of `ks`; `inflate`: 4-bit codes become int8
// ones, and their tiles those of int8. On the caller's thread alone: loaders are several.
void op_retile(Codec codec, const uint8_t* src, int64_t n, int64_t Kp, int64_t ks, bool inflate, int64_t run, uint8_t* dst);

// The least code among `bytes` bytes of i4 codes.
int op_least_int4(const uint8_t* codes, int64_t bytes);

// Rows as int4 programs read them: [Kp/ks][M] runs of ks codes, two codes a byte and the even one low, `pitch` bytes apart.
// False: a code lies outside of -8..7.
bool op_pack_int4(const Rows& rows, int64_t ks, int64_t pitch, uint8_t* to);

// out[m][n0 + c] for rows [p.m0, m1) as the CPU's product gives it (Kernels::scale_partial_sums).
void op_scale_partial_sums(const PartialSums& p, int64_t m1, const Rows& rows, const Slice& slice, const Mat& out, const float* bias);

}  // namespace ork

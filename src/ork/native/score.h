// How likely models found what came next: rows of logits spread over the pool.
#pragma once
#include <cstdint>
#include "kernels.h"

namespace ork {

// nll[m] = -ln softmax(logits[m])[targets[m]], top[m] = the first index of the largest logit.
void op_score(const Mat& logits, const int32_t* targets, double* nll, int32_t* top);

// Both models' rows, and kl[m] = sum of p ln(p / q) with p the softmax of `base`, q of `other`. A row of each result has
// the two models' values next to each other: nll [M][2], top [M][2].
void op_compare(const Mat& base, const Mat& other, const int32_t* targets, double* nll, int32_t* top, double* kl);

}  // namespace ork

#include "score.h"

#include <cmath>
#include "pool.h"

namespace ork {
namespace {

struct Row {
    double log_sum;   // ln of the sum of e^logit
    double weighted;  // sum of p * (logit - the other's logit)
    int32_t top;
};

Row score(const float* x, const float* other, int64_t n) {
    float largest;
    int64_t at;
    double sums[2] = {0.0, 0.0};
    kernels()->top(x, n, &largest, &at);
    kernels()->exp_sums(x, other, n, largest, sums);
    return {(double)largest + std::log(sums[0]), sums[1] / sums[0], (int32_t)at};
}

}  // namespace

void op_score(const Mat& logits, const int32_t* targets, double* nll, int32_t* top) {
    parallel_chunks(logits.rows, 1, [&](int64_t b, int64_t e, int) {
        for (int64_t m = b; m < e; m++) {
            const float* x = logits.data + m * logits.stride;
            const Row r = score(x, nullptr, logits.cols);
            nll[m] = r.log_sum - (double)x[targets[m]];
            top[m] = r.top;
        }
    });
}

void op_compare(const Mat& base, const Mat& other, const int32_t* targets, double* nll, int32_t* top, double* kl) {
    parallel_chunks(base.rows, 1, [&](int64_t b, int64_t e, int) {
        for (int64_t m = b; m < e; m++) {
            const float *x = base.data + m * base.stride, *y = other.data + m * other.stride;
            const Row p = score(x, y, base.cols), q = score(y, nullptr, base.cols);
            nll[2 * m] = p.log_sum - (double)x[targets[m]];
            nll[2 * m + 1] = q.log_sum - (double)y[targets[m]];
            top[2 * m] = p.top;
            top[2 * m + 1] = q.top;
            kl[m] = p.weighted - (p.log_sum - q.log_sum);
        }
    });
}

}  // namespace ork

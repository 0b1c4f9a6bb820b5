// Tests of kernels_score.inl: the largest logit and sums of exponentials against double precision.
#pragma once
#include <algorithm>
#include "test_reference.h"

namespace ork::test {

inline void score(const Kernels& k, Trace& t) {
    for (int64_t n : {1, 2, 15, 16, 17, 100, 1001, 4096, 4097, 9000})
        for (int special = 0; special < 4; special++) {
            Random r(n * 10 + special);
            std::vector<float> p = floats(r, n, 3.0f, 12.0f), q = floats(r, n, 0.0f, 9.0f);
            if (special == 1) p[r.below(n)] = NAN;
            if (special == 2) p[n / 2] = p[n - 1] = 40.0f;   // the first of two
            if (special == 3) for (float& x : p) x = -INFINITY;
            t.at("score n=%d special=%d", (int)n, special);
            float largest = POISON;
            int64_t at = -7;
            k.top(p.data(), n, &largest, &at);
            double sums[2][2] = {{POISON, POISON}, {POISON, POISON}};
            k.exp_sums(p.data(), nullptr, n, largest, sums[0]);
            k.exp_sums(p.data(), q.data(), n, largest, sums[1]);
            t.record(&largest, 1);
            t.expect(sums[0][1] == (double)POISON, "one model alone has one sum");
            t.expect(special == 1 || special == 3 || sums[0][0] == sums[1][0], "the sum is the same beside another model");
            for (double s : {sums[1][0], sums[1][1]}) {
                int32_t halves[2];
                if (std::isnan(s)) s = NAN;   // which NaN is not specified
                std::memcpy(halves, &s, 8);
                t.record(halves, std::isnan(s) ? 0 : 2);
                t.expect(std::isnan(s) == (special == 1 || special == 3), "NaN and infinities show in the sums, numbers don't");
            }
            if (special == 3) { t.expect(at == 0, "the first of equals"); continue; }
            if (special == 1) { t.expect(at >= 0 && at < n && !(n > 1 && std::isnan(p[at])), "NaN is nobody's largest"); continue; }
            t.expect(at == std::max_element(p.begin(), p.end()) - p.begin() && largest == p[at], "the first of the largest");
            if (!t.oracle) continue;
            double total = 0, weighted = 0, size = 0;
            for (int64_t i = 0; i < n; i++) {
                const double e = std::exp((double)p[i] - largest), d = (double)p[i] - q[i];
                total += e;
                weighted += e * d;
                size += e * std::fabs(d);
            }
            t.close(sums[1][0], total, 1e-6 * total, "sum", n);
            t.close(sums[1][1], weighted, 1e-6 * size, "weighted sum", n);
        }
}

}  // namespace ork::test

// Tests of kernels_experts.inl, and of routing and the products of experts over them. Part of test_kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include "conv.h"
#include "experts.h"
#include "pool.h"
#include "test_reference.h"

namespace ork::test {
namespace {

void sigmoids_and_sums(const Kernels& k, Trace& t) {
    for (int64_t n : {1, 15, 16, 17, 100, 128}) {
        Random r(n);
        std::vector<float> x = floats(r, n, 0.0f, 4.0f), y((size_t)n + 16, POISON);
        if (n > 20) { x[3] = 200.0f; x[4] = -200.0f; x[5] = NAN; x[6] = INFINITY; x[7] = -INFINITY; }
        t.at("sigmoid n=%d", (int)n);
        k.sigmoid(x.data(), n, y.data());
        t.record(y);
        for (int64_t i = 0; i < n; i++) if (std::isfinite(x[i])) t.close(y[i], 1 / (1 + std::exp(-(double)x[i])), 1e-6, "sigmoid", i);
        for (int64_t i = n; i < n + 16; i++) t.expect(y[i] == POISON, "nothing behind the end");
    }
    for (int64_t cols : {5, 64, 100}) {
        Random r(cols);
        const int64_t rows = 4, count = 3;
        Matrix y(rows * count, cols, r), out(rows, cols, POISON), x(rows, cols, r);
        const std::vector<float> w = floats(r, rows * count, 0.3f, 0.2f), weight = floats(r, cols, 0.0f, 0.3f);
        const std::vector<int32_t> places = {3, 0, 11, 4, 5, 6, 1, 2, 10, 7, 8, 9};
        t.at("weighted_sum cols=%d", (int)cols);
        k.weighted_sum(y.mat(), places.data(), w.data(), count, 1, rows, out.mat());
        t.record(out.v);
        for (int64_t m = 1; m < rows; m++)
            for (int64_t c = 0; c < cols; c++) {
                float sum = 0.0f;
                for (int64_t i = 0; i < count; i++) sum = std::fmaf(w[m * count + i], y.at(places[m * count + i], c), sum);
                t.expect(out.at(m, c) == sum, "fma from 0, experts ascending");
            }
        t.expect(out.at(0, 0) == POISON, "no other row");
        t.at("gate_rows cols=%d", (int)cols);
        Matrix gated = y;
        k.gate_rows(x.mat(), weight.data(), gated.mat(), 0, rows);
        t.record(gated.v);
        for (int64_t m = 0; m < rows; m++) {
            double dot = 0;
            for (int64_t c = 0; c < cols; c++) dot += (double)x.at(m, c) * weight[c];
            for (int64_t c = 0; c < cols; c++) t.close(gated.at(m, c), y.at(m, c) / (1 + std::exp(-dot)), 1e-5, "gated", c);
        }
    }
}

void convolutions(const Kernels& k, Trace& t) {
    choose_kernels(k.name);
    for (bool half : {false, true})
        for (int64_t width : {7, 16, 40}) {
            Random r(width);
            const int64_t length = 300, T = 3;
            Matrix bcx(length, 3 * width, r), taps(T, width, r), whole(length, width, POISON), parts(length, width, POISON);
            Batch b;
            b.table = {2, 0};
            b.table_stride = 2;
            auto run = [&](ConvCache& cache, int64_t p, int64_t n, Matrix& out) {
                b.runs = {{0, (int32_t)n, 0, (int32_t)p}};
                b.slots.clear();
                for (int64_t i = p; i < p + n; i++) b.slots.push_back((int32_t)(b.table[i / 256] * 256 + i % 256));
                auto part = [&](Matrix& m) { return Mat{&m.at(p, 0), n, m.cols, m.stride}; };
                op_short_conv(cache.layer(1), b, part(bcx), taps.mat(), part(out));
            };
            t.at("short_conv width=%d half=%d", (int)width, half);
            ConvCache one(2, width, 3, half), other(2, width, 3, half);
            run(one, 0, length, whole);
            for (int64_t p = 0, n; p < length; p += n) { n = std::min<int64_t>(p % 3 ? 1 : 95, length - p); run(other, p, n, parts); }
            t.record(whole.v);
            t.same(parts.v.data(), whole.v.data(), whole.v.size(), "in chunks");
            for (int64_t p : {0, 1, 2, 255, 256, 257, 299})
                for (int64_t c = 0; c < width; c++) {
                    double sum = 0, size = 0;
                    for (int64_t i = 0; i < T; i++) {
                        const int64_t q = p - (T - 1) + i;
                        const double v = q < 0 ? 0 : (double)taps.at(i, c) * bcx.at(q, c) * bcx.at(q, 2 * width + c);
                        sum += v;
                        size += std::fabs(v);
                    }
                    t.expect(std::fabs(whole.at(p, c) - bcx.at(p, width + c) * sum) <= (half ? 1e-3 : 1e-6) * size * std::fabs(bcx.at(p, width + c)), "the convolution");
                }
        }
    pool_resize(1);
}

void routed(const Kernels& k, Trace& t) {   // gathered rows of several experts in one call, as each alone
    choose_kernels(k.name);
    const int64_t M = 37, E = 6, K = 192, N = 128, top = 2;
    for (Codec codec : {Codec::i8, Codec::nf4, Codec::f32})
        for (int threads : {1, 3}) {
            pool_resize(threads);
            Random r(3);
            Matrix x(M, K, r), logits(M, E, r);
            Routes routes;
            t.at("routed codec=%d threads=%d", (int)codec, threads);
            t.expect(op_route(logits.mat(), {top, false, true, 1.0f, nullptr, 1, 1}, routes) == -1, "finite logits");
            if (threads == 1) { t.record(routes.ids); t.record(routes.weights); t.record(routes.places); t.record(routes.sources); }
            for (int64_t m = 0; m < M; m++) t.close(routes.weights[2 * m] + routes.weights[2 * m + 1], 1.0, 1e-6, "normalised", m);
            QuantisedRows q(M, K), g(M * top, K);
            op_quantise(x.mat(), {}, 127, q);
            op_gather_rows(q.view(), routes, g);
            Matrix gathered(M * top, K, 0.0f), together(M * top, N, POISON), alone(M * top, N, POISON);
            op_gather_floats(x.mat(), routes, gathered.mat());
            const Rows rows = g.view();
            const bool quantised = is_quantised(codec);
            std::vector<Weights> experts;   // a slice points into its own
            experts.reserve((size_t)E);
            for (int64_t e = 0; e < E; e++) experts.emplace_back(codec, K, quantised ? 192 : 32, N, 0, r);
            std::vector<ExpertJob> jobs;
            for (int64_t e = 0; e < E; e++) {
                const Range range = {routes.offsets[e], routes.offsets[e + 1]};
                if (range.begin == range.end) continue;
                jobs.push_back({experts[e].slice, range, together.mat()});
                linear_blocks(gathered.mat(), quantised ? &rows : nullptr, range.begin, range.end, experts[e].slice, 0, column_blocks(experts[e].slice, quantised ? &rows : nullptr).count, alone.mat(), nullptr);
            }
            op_linear_experts(gathered.mat(), quantised ? &rows : nullptr, jobs);
            t.same(together.v.data(), alone.v.data(), alone.v.size(), "all at once as each alone");
            if (threads == 1) t.record(together.v);
            logits.at(20, 3) = NAN;
            logits.at(9, 0) = INFINITY;
            t.expect(op_route(logits.mat(), {top, true, true, 1.0f, nullptr, 1, 1}, routes) == 9, "the first row that is not finite");
        }
    pool_resize(1);
}

void experts(const Kernels& k, Trace& t) {
    sigmoids_and_sums(k, t);
    convolutions(k, t);
    routed(k, t);
}

}  // namespace
}  // namespace ork::test

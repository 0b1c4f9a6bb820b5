// Rotation, quantisation, look-ups of every codec, and products with f16 weights against double precision. Part of test_kernels.
#pragma once
#include <algorithm>
#include "test_reference.h"

namespace ork::test {
namespace {

// A made-up rotation and its definition. Q is a product of two reflections: orthogonal, and not symmetric, so that a
// transposition shows.
struct Turn {
    std::vector<float> sign, q;
    int64_t K, block, m;
    Turn(int64_t K_, int64_t block_, bool mix, Random& r) : K(K_), block(block_), m(mix ? K_ / block_ : 0) {
        if (!block) return;
        sign = signs(r, K);
        if (!mix) return;
        std::vector<double> a((size_t)m), b((size_t)m);
        double aa = 0, bb = 0, ab = 0;
        for (int64_t i = 0; i < m; i++) { a[i] = r.bell() + 2.0; b[i] = r.bell() - 1.5; aa += a[i] * a[i]; bb += b[i] * b[i]; ab += a[i] * b[i]; }
        q.resize((size_t)(m * m));
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < m; j++)
                q[(size_t)(i * m + j)] = (float)((i == j) - 2 * a[i] * a[j] / aa - 2 * b[i] * b[j] / bb + 4 * ab * a[i] * b[j] / (aa * bb));
    }
    Rotation view() const { return block ? Rotation{sign.data(), block, m ? q.data() : nullptr, m} : Rotation{}; }
    std::vector<double> there(const std::vector<double>& x) const {
        if (!block) return x;
        std::vector<double> s((size_t)K), h((size_t)K), y((size_t)K, 0.0);
        for (int64_t i = 0; i < K; i++) s[i] = x[i] * sign[i];
        hadamard(s, h);
        if (!m) return h;
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < m; j++)
                for (int64_t c = 0; c < block; c++) y[i * block + c] += (double)q[i * m + j] * h[j * block + c];
        return y;
    }
    std::vector<double> back(std::vector<double> x) const {
        if (!block) return x;
        if (m) {
            std::vector<double> y((size_t)K, 0.0);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < m; j++)
                    for (int64_t c = 0; c < block; c++) y[i * block + c] += (double)q[j * m + i] * x[j * block + c];
            x = y;
        }
        std::vector<double> h((size_t)K);
        hadamard(x, h);
        for (int64_t i = 0; i < K; i++) h[i] *= sign[i];
        return h;
    }

  private:   // butterflies in double precision, checked against hadamard_at by `rotate` below
    void hadamard(const std::vector<double>& x, std::vector<double>& y) const {
        y = x;
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < K; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) { const double a = y[j], b = y[j + h]; y[j] = a + b; y[j + h] = a - b; }
        for (double& v : y) v /= std::sqrt((double)block);
    }
};

struct RotatedShape { int64_t K, block; bool mix; };
inline std::vector<RotatedShape> rotated_shapes() {
    std::vector<RotatedShape> all;
    for (int64_t K : {1, 5, 16, 31, 48, 100, 576, 960, 4096, 5120, 12288})
        for (int64_t block = 0; block <= 4096 && (block == 0 || K % block == 0); block = block ? block * 2 : 1) all.push_back({K, block, false});   // 0: no rotation
    for (RotatedShape s : {RotatedShape{5, 1, true}, {12, 4, true}, {20, 4, true}, {48, 16, true}, {56, 8, true}, {96, 32, true}, {576, 64, true}, {896, 128, true}, {1376, 32, true}, {4864, 256, true}, {8192, 4096, true}, {8960, 256, true}, {8176, 16, true}}) all.push_back(s);
    return all;
}

void quantise(const Kernels& k, Trace& t) {
    for (RotatedShape s : rotated_shapes())
        for (int64_t group : {0, 32, 64, 96, 128, 1792})
            for (int limit : {127, 7}) {
                const int64_t K = s.K, Kp = round_up(K, 32);
                if (group && (Kp % group || (s.block > 1 && s.block < 32 && !s.mix))) continue;   // enough of them are left
                if (limit == 7 && !s.mix && (K > 1000 || (s.block > 1 && s.block < 64))) continue;
                Random r(K * 13 + s.block + group);
                const Turn turn(K, s.block, s.mix, r);
                const int64_t M = K > 600 ? 2 : 14, count = group ? Kp / group : 1, run = group ? group : Kp;
                Matrix x(M, K, r, 3.0f);
                if (M == 14) {
                    const float sizes[] = {0.0f, 1e-45f, 1e-39f, 1.2e-38f, 3.7e-37f, 3.8e-37f, 1e36f};   // zero, subnormal absmax, no reciprocal, huge
                    for (int64_t m = 0; m < 7; m++) for (int64_t i = 0; i < K; i++) x.at(m, i) = r.uniform() * sizes[m];
                    x.at(7, r.below(K)) = INFINITY;
                    x.at(8, r.below(K)) = NAN;
                    x.at(9, r.below(K)) = 1e6f;                                                      // one outlier
                    for (int64_t i = 0; i < K; i++) x.at(10, i) = (float)r.below(254) * 0.5f - 63.5f;   // halves: ties
                    x.at(10, 0) = 127.0f;
                    for (int64_t i = 0; i < K; i++) x.at(11, i) *= i % 128 < 64 ? 1e-30f : 1e3f;      // groups that differ
                }
                std::vector<int8_t> codes((size_t)(M * Kp), 99);
                std::vector<float> scales((size_t)(M * count), POISON);
                std::vector<int32_t> sums((size_t)(M * count), 77);
                t.at("quantise K=%d block=%d mix=%d group=%d limit=%d", (int)K, (int)s.block, (int)turn.m, (int)group, limit);
                k.quantise(x.mat(), 0, M, turn.view(), {codes.data(), scales.data(), sums.data(), Kp, group, limit});
                t.record(codes);
                t.record(scales);
                t.record(sums);
                if (!t.oracle) continue;
                for (int64_t m = 0; m < M; m++) {
                    const int8_t* q = &codes[m * Kp];
                    std::vector<double> row((size_t)K);
                    double norm = 0;
                    for (int64_t i = 0; i < K; i++) { row[i] = x.at(m, i); norm += row[i] * row[i]; }
                    const std::vector<double> want = turn.there(row);
                    for (int64_t g = 0; g < count; g++) {
                        const double scale = scales[m * count + g];
                        int32_t sum = 0;
                        bool finite = true;
                        double top = 0;
                        for (int64_t i = g * run; i < (g + 1) * run; i++) {
                            sum += q[i];
                            t.expect(std::abs(q[i]) <= limit && (i < K || q[i] == 0), "codes within the limit, zero past K");
                            if (i < K) { top = std::max(top, std::fabs(want[i])); finite = finite && std::isfinite(want[i]); }
                        }
                        t.expect(sum == sums[m * count + g], "the sum is that of the codes");
                        if (!finite) { t.expect(std::isnan(scale) && sum == 0, "a group with an infinity or NaN has a NaN scale and no codes"); continue; }
                        // an absmax this small may have no float reciprocal: subnormal, or limit / absmax overflows
                        const double width = std::sqrt((double)std::max<int64_t>(s.block, 1)), rounding = (std::isfinite(norm) ? std::sqrt(norm) : top * width) * 1e-6, dead = 4e-37 * width;
                        if (top > dead) t.close(scale * limit, top, top * 1e-6 + rounding, "scale * limit", g);
                        for (int64_t i = g * run; i < std::min((g + 1) * run, K); i += K > 1000 ? 97 : 1)
                            t.close((double)q[i] * scale, want[i], std::max(scale * 0.50001 + rounding, top < dead ? top * (1 + 1e-5) * width : 0), "code * scale", i);
                    }
                }
            }
}

void rotate(const Kernels& k, Trace& t) {
    for (RotatedShape s : rotated_shapes()) {
        const int64_t K = s.K;
        if (!s.block) continue;
        Random r(K + s.block);
        Matrix x(2, K, r);
        x.v.resize((size_t)(x.stride + K));   // the last row is not padded
        std::vector<float> y = x.v;
        const Turn turn(K, s.block, s.mix, r);
        t.at("rotate K=%d block=%d mix=%d", (int)K, (int)s.block, (int)turn.m);
        k.rotate(y.data(), 2, x.stride, K, turn.view(), false);
        std::vector<float> back = y;
        k.rotate(back.data(), 2, x.stride, K, turn.view(), true);
        t.record(y);
        t.record(back);
        if (!t.oracle) continue;
        for (int64_t m = 0; m < 2; m++) {
            std::vector<double> row((size_t)K);
            double norm = 0;
            for (int64_t i = 0; i < K; i++) { row[i] = x.at(m, i); norm += row[i] * row[i]; }
            const std::vector<double> want = turn.there(row), returned = turn.back(want);
            for (int64_t i = 0; i < K; i++) {
                t.close(y[m * x.stride + i], want[i], 1e-6 * std::sqrt(norm), "rotated", i);
                t.close(back[m * x.stride + i], x.at(m, i), 1e-6 * std::sqrt(norm), "rotated there and back", i);
                t.close(returned[i], row[i], 1e-6 * std::sqrt(norm), "the definition there and back", i);
            }
            for (int64_t i = 0; i < K; i++) row[i] *= turn.sign[i];
            for (int64_t i = 0; !s.mix && i < K; i += K > 500 ? 61 : 1) t.close(want[i], hadamard_at(&row[i / s.block * s.block], s.block, i % s.block), 1e-12 * std::sqrt(norm), "the definition", i);
        }
    }
}

void gather(const Kernels& k, Trace& t) {
    struct { int64_t K, block; bool mix; } shapes[] = {{8, 0, false}, {8, 4, false}, {20, 4, true}, {32, 0, false}, {100, 4, false}, {576, 64, false}, {576, 64, true}, {1152, 0, false}, {8192, 4096, false}, {8192, 4096, true}};
    for (auto s : shapes)
        for (Codec codec : {Codec::f32, Codec::i8, Codec::i4, Codec::nf4, Codec::f16})
            for (int64_t group : {0, 32, 64}) {
                const int64_t ks = s.K > 4096 ? 4096 : round_up(s.K, 32);
                const bool quantised = is_quantised(codec);
                if (group && (!quantised || ks % group)) continue;
                Random r(s.K + s.block + (int)codec * 7 + group);
                const Weights w(codec, s.K, ks, 128, 0, r, group);
                const Turn turn(s.K, quantised ? s.block : 0, quantised && s.mix, r);
                t.at("gather codec=%d K=%d block=%d mix=%d group=%d", (int)codec, (int)s.K, (int)turn.block, (int)turn.m, (int)group);
                for (int64_t c : {0, 1, 15, 16, 31, 32, 63, 64, 127}) {
                    std::vector<float> out((size_t)s.K, POISON);
                    k.gather(w.slice, c, s.K, turn.view(), out.data());
                    t.record(out);
                    if (!t.oracle) continue;
                    std::vector<double> row((size_t)s.K);
                    double norm = 0;
                    for (int64_t i = 0; i < s.K; i++) { row[i] = w.weight(c, i); norm += row[i] * row[i]; }
                    const std::vector<double> want = turn.back(row);
                    for (int64_t i = 0; i < s.K; i++) t.close(out[i], want[i], quantised ? 1e-6 * std::sqrt(norm) : 0, "weight", i);
                }
            }
}

void linear_f16(const Kernels& k, Trace& t) {
    struct { int64_t K, ks; } shapes[] = {{1, 32}, {5, 32}, {33, 64}, {200, 224}, {288, 96}, {577, 608}, {4480, 2240}};
    for (auto s : shapes)
        for (int64_t M : {1, 2, 3, 5, 13}) {
            Random r(s.K * 100 + M);
            Weights w(Codec::f16, s.K, s.ks, 128, 64, r), plain(Codec::f32, s.K, 32, 128, 64, r);
            for (int64_t c = 0; c < 128; c++)   // the same weights as f32
                for (int64_t i = 0; i < s.K; i++) std::memcpy(&plain.codes[(size_t)(4 * (c / 16 * 16 * plain.Kp + i * 16 + c % 16))], &w.plain_f32[(size_t)(c * w.Kp + i)], 4);
            Matrix x(M, s.K, r), out(M, 192, POISON), same(M, 192, POISON), part(M, 192, POISON);
            for (int i = 0; i < 2; i++) x.at(M - 1, r.below(s.K)) = EXTREMES[r.below(16)];
            const std::vector<float> bias = floats(r, 192, 0.0f, 9.0f);
            t.at("linear_f16 M=%d K=%d ks=%d", (int)M, (int)s.K, (int)s.ks);
            k.linear_f16(x.mat(), 0, M, w.slice, 0, 4, out.mat(), bias.data());
            k.linear_f32(x.mat(), 0, M, plain.slice, 0, 4, same.mat(), bias.data());
            k.linear_f16(x.mat(), M / 2, M, w.slice, 1, 3, part.mat(), nullptr);
            t.record(out.v);
            t.record(part.v);
            t.same(out.v.data(), same.v.data(), out.v.size(), "as f32 gives");
            if (!t.oracle) continue;
            for (int64_t m = 0; m + 1 < M; m++)
                for (int64_t c = 0; c < 128; c++) {
                    double y = bias[64 + c], size = 9;
                    for (int64_t i = 0; i < s.K; i++) { const double p = x.at(m, i) * w.weight(c, i); y += p; size += std::fabs(p); }
                    t.close(out.at(m, 64 + c), y, size * (double)(s.K + 2) * 0x1p-24, "row", m * 128 + c);
                }
        }
}

}  // namespace
}  // namespace ork::test

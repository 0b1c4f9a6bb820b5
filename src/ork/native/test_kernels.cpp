// The kernels' own tests, without Python: every table entry of every instruction set that runs here gives the same words as
// the portable one, the portable one agrees with plain definitions in double precision, and threads change nothing.
//   test_kernels           all groups, each with a hash of its output words that is the same on every processor; exit 1 if one fails
//   test_kernels --isa X   the groups' hashes under one instruction set; exit 1 if it does not run here
#include <algorithm>
#include "test_attention.h"
#include "test_experts.h"
#include "test_grouped.h"
#include "test_npu.h"
#include "test_reference.h"
#include "test_quant.h"
#include "test_score.h"
#include "test_rows.h"
#include "test_threads.h"

namespace ork::test {
namespace {

namespace math {   // the portable exp, tanh, sin and cos, which no table entry shows bare
#include "v16_portable.h"
#include "kernels_math.inl"
}  // namespace math

// --- matrix products --------------------------------------------------------------------------------------------------------

void linear_i8(const Kernels& k, Trace& t) {
    struct { int64_t K, ks, n, M; } shapes[] = {{32, 32, 64, 13}, {64, 32, 128, 6}, {90, 32, 64, 7}, {288, 96, 64, 5}, {576, 576, 192, 13}, {2300, 1152, 64, 9}, {8192, 4096, 64, 3}, {65536, 4096, 64, 7}};
    for (auto s : shapes)
        for (int full = 0; full < 2; full++)
            for (int64_t M = s.K < 600 ? 1 : s.M; M <= s.M; M++) {
                if (full && s.K > 60000) continue;
                Random r(s.K * 100 + M * 2 + full);
                Weights w(Codec::i8, s.K, s.ks, s.n, 64, r);
                std::vector<int8_t> a((size_t)(M * w.Kp), 0);
                std::vector<int32_t> sums((size_t)M, 0);
                const std::vector<float> scales = floats(r, M, 0.5f, 0.4f), bias = floats(r, 64 + s.n, 0.0f, 9.0f);
                for (int64_t m = 0; m < M; m++)
                    for (int64_t i = 0; i < s.K; i++)   // the first row holds the largest sums there are
                        sums[m] += a[m * w.Kp + i] = m == 0 ? (full ? -128 : 127) : r.code(full ? -128 : -127);
                const Rows rows = {a.data(), scales.data(), sums.data(), M, w.Kp, 0, full != 0};
                t.at("linear_i8 M=%d K=%d ks=%d n=%d full_range=%d", (int)M, (int)s.K, (int)s.ks, (int)s.n, full);

                std::vector<int32_t> acc((size_t)(M * (64 + s.n)), 77);
                k.accumulate_i8(rows, w.slice, 0, s.n / 32, acc.data(), 64 + s.n);
                Matrix plain(M, 64 + s.n, POISON), biased(M, 64 + s.n, POISON);
                k.linear_i8(rows, 0, M, w.slice, 0, s.n / 32, plain.mat(), nullptr);
                k.linear_i8(rows, M / 2, M, w.slice, 1, s.n / 32, biased.mat(), bias.data());
                t.record(acc);
                t.record(plain.v);
                t.record(biased.v);
                if (!t.oracle) continue;
                for (int64_t m = 0; m < M; m++)
                    for (int64_t c = 0; c < s.n; c++) {
                        int64_t exact = 0;
                        for (int64_t i = 0; i < w.Kp; i++) exact += a[m * w.Kp + i] * w.plain_i8[c * w.Kp + i];
                        const float y = (float)exact * (scales[m] * w.scales[c]);   // as kernels.h specifies it, to the bit
                        t.close(acc[m * (64 + s.n) + 64 + c], (double)exact, 0, "sum", m * s.n + c);
                        t.close(plain.at(m, 64 + c), y, 0, "row", m * s.n + c);
                        t.close(biased.at(m, 64 + c), m >= M / 2 && c >= 32 ? y + bias[64 + c] : POISON, 0, "biased", m * s.n + c);
                    }
            }
}

void linear_f32(const Kernels& k, Trace& t) {
    for (int64_t K : {1, 5, 16, 33, 200, 577})
        for (int64_t M : {1, 2, 3, 5, 8, 11, 13}) {
            Random r(K * 100 + M);
            Weights w(Codec::f32, K, 32, 128, 64, r);
            Matrix x(M, K, r), out(M, 192, POISON), special(1, K, r), shown(1, 192, POISON);
            const std::vector<float> bias = floats(r, 192, 0.0f, 9.0f);
            for (int i = 0; i < 3; i++) special.at(0, r.below(K)) = EXTREMES[r.below(16)];
            t.at("linear_f32 M=%d K=%d", (int)M, (int)K);
            k.linear_f32(x.mat(), 0, M, w.slice, 0, 4, out.mat(), bias.data());
            k.linear_f32(special.mat(), 0, 1, w.slice, 1, 3, shown.mat(), nullptr);
            t.record(out.v);
            t.record(shown.v);
            if (!t.oracle) continue;
            for (int64_t m = 0; m < M; m++)
                for (int64_t c = 0; c < 128; c++) {
                    double y = bias[64 + c], size = 9;
                    for (int64_t i = 0; i < K; i++) { const double p = (double)x.at(m, i) * w.plain_f32[c * w.Kp + i]; y += p; size += std::fabs(p); }
                    t.close(out.at(m, 64 + c), y, size * (double)(K + 2) * 0x1p-24, "row", m * 128 + c);
                }
        }
}

// --- rows -------------------------------------------------------------------------------------------------------------------

void norms(const Kernels& k, Trace& t) {
    for (int64_t dim : {1, 4, 8, 16, 20, 33, 64, 128, 250, 256, 1152}) {
        Random r(dim);
        const int64_t heads = 3, M = 6;
        const std::vector<float> weight = floats(r, dim, 1.0f, 0.5f);
        Matrix x(M, dim, r, 5.0f), out(M, dim, POISON), h(M, heads * dim, r, 0.1f);
        for (int64_t i = 0; i < dim; i++) { x.at(1, i) = 0.0f; x.at(2, i) *= 1e-30f; x.at(3, i) *= 1e25f; }
        x.at(4, r.below(dim)) = NAN;
        x.at(5, r.below(dim)) = -INFINITY;
        const Matrix before = h;
        t.at("norms dim=%d", (int)dim);
        k.rms_norm(x.mat(), 0, M, weight.data(), 1e-6f, out.mat());
        k.head_norm(h.mat(), 1, M, dim, weight.data(), 1e-5f);
        t.record(out.v);
        t.record(h.v);
        if (!t.oracle) continue;
        auto check = [&](const float* in, const float* got, double eps, const char* what) {
            double s = 0;
            for (int64_t i = 0; i < dim; i++) s += (double)in[i] * in[i];
            for (int64_t i = 0; i < dim; i++) {
                const double want = s / (double)dim > 3e38 ? in[i] * 0.0 : in[i] / std::sqrt(s / (double)dim + eps) * weight[i];
                t.close(got[i], want, 1e-6 * std::fabs(want), what, i);
            }
        };
        for (int64_t m = 0; m < 4; m++) check(&x.at(m, 0), &out.at(m, 0), 1e-6f, "rms_norm");
        for (int64_t i = 0; i < dim; i++) t.close(out.at(4, i), NAN, 0, "rms_norm of a NaN", i);
        for (int64_t m = 1; m < M; m++) for (int64_t c = 0; c < heads; c++) check(&before.v[m * h.stride + c * dim], &h.at(m, c * dim), 1e-5f, "head_norm");
    }
}

void rope(const Kernels& k, Trace& t) {
    struct { int64_t dim, rotated, heads; } shapes[] = {{64, 64, 3}, {128, 128, 2}, {256, 64, 1}, {20, 20, 3}, {8, 4, 5}, {96, 34, 1}};
    for (auto s : shapes)
        for (int kind = 0; kind < 2; kind++) {
            Random r(s.dim * 2 + kind);
            const int64_t M = 7, count = s.rotated / 2;
            const int32_t positions[M] = {0, 1, 2, 255, 4095, 131071, 1048575};
            std::vector<double> freq((size_t)count);
            for (int64_t i = 0; i < count; i++) freq[i] = 1.0 / (double)(1 + i * i);
            Matrix table(M, s.rotated, POISON), x(M, s.dim * s.heads, r);
            const Matrix before = x;
            t.at("rope dim=%d rotated=%d pairs=%d", (int)s.dim, (int)s.rotated, kind);
            k.rope_table(positions, 0, M, freq.data(), count, 1.25f, table.v.data(), table.stride);
            k.rope(x.mat(), 0, M, s.dim, s.rotated, (RopePairs)kind, table.v.data(), table.stride);
            t.record(table.v);
            t.record(x.v);
            if (!t.oracle) continue;
            for (int64_t m = 0; m < M; m++)
                for (int64_t i = 0; i < count; i++) {
                    const double angle = positions[m] * freq[i], c = 1.25 * std::cos(angle), sn = 1.25 * std::sin(angle);
                    t.close(table.at(m, i), c, 1.5e-7, "cos", i);
                    t.close(table.at(m, count + i), sn, 1.5e-7, "sin", i);
                    for (int64_t h = 0; h < s.heads; h++) {
                        const int64_t p = h * s.dim + (kind ? i : 2 * i), q = kind ? p + count : p + 1;
                        const double a = before.v[m * x.stride + p], b = before.v[m * x.stride + q];
                        t.close(x.at(m, p), a * c - b * sn, 2e-6, "first of the pair", p);
                        t.close(x.at(m, q), a * sn + b * c, 2e-6, "second of the pair", q);
                    }
                }
        }
}

void elementwise(const Kernels& k, Trace& t) {
    for (int64_t cols : {1, 15, 17, 64, 100, 1000, 4096}) {
        Random r(cols);
        const int64_t M = 3;
        Matrix g(M, cols, r, 4.0f), u(M, cols, r), out(M, cols, POISON);
        for (int64_t i = 0; i < cols; i++) { g.at(1, i) = r.wild(); g.at(2, i) = i < 16 ? EXTREMES[i] : r.uniform() * 100.0f; u.at(2, i) = 1.0f; }
        t.at("elementwise cols=%d", (int)cols);
        for (Gate kind : {Gate::silu, Gate::gelu_tanh}) {
            k.gate(kind, g.mat(), u.mat(), 0, M, out.mat());
            t.record(out.v);
            for (int64_t i = 0; t.oracle && i < cols; i++) {   // 1e-6 of the value; what exp's clamp at 88 leaves is below 1e-35
                const double x = g.at(0, i), want = (kind == Gate::silu ? silu(x) : gelu_tanh(x)) * u.at(0, i);
                t.close(out.at(0, i), want, kind == Gate::silu ? 1e-6 * std::fabs(want) + 1e-35 : 3e-6 * std::fabs(want) + 1e-6 * std::exp(-std::fabs(x)), "gate", i);
            }
        }
        Matrix x = g;
        k.add(g.mat(), u.mat(), 0, M, out.mat());
        t.record(out.v);
        for (int64_t i = 0; t.oracle && i < cols; i++) t.close(out.at(0, i), g.at(0, i) + u.at(0, i), 0, "add", i);
        k.scale(x.mat(), 1, M, 0.3f);
        t.record(x.v);
        for (int64_t i = 0; t.oracle && i < cols; i++) t.close(x.at(2, i), g.at(2, i) * 0.3f, 0, "scale", i);
        for (float cap : {1.0f, 30.0f}) {
            x = g;
            k.softcap(x.mat(), 0, M, cap);
            t.record(x.v);
            for (int64_t i = 0; t.oracle && i < cols; i++)
                for (int64_t m : {0, 2}) {
                    const double want = cap * std::tanh((double)g.at(m, i) / cap);
                    t.close(x.at(m, i), want, 5e-7 * std::fabs(want) + 1e-43, "softcap", i);
                }
        }
    }
}

void softmax(const Kernels& k, Trace& t) {
    for (int64_t n : {1, 2, 15, 16, 17, 100, 1001})
        for (float inverse : {1.0f, 0.7f, 20.0f})
            for (int special = 0; special < 3; special++) {
                Random r(n);
                std::vector<float> x = floats(r, n, 0.0f, 12.0f), out((size_t)n, POISON);
                if (special == 1) x[r.below(n)] = NAN;
                if (special == 2 && n > 1) x[1] = -INFINITY;
                t.at("softmax n=%d inverse=%g special=%d", (int)n, (double)inverse, special);
                k.softmax(x.data(), n, inverse, out.data());
                t.record(out);
                if (!t.oracle || special == 1) continue;
                const double top = *std::max_element(x.begin(), x.end());
                double sum = 0;
                for (float v : x) sum += std::exp((v - top) * inverse);
                for (int64_t i = 0; i < n; i++) {   // the difference is rounded before exp, hence the share of its size
                    const double z = (x[i] - top) * inverse, want = std::exp(z) / sum;
                    t.close(out[i], want, z < -1e4 ? 0 : want * (1e-6 + 1.5e-7 * std::fabs(z)) + 1e-37, "probability", i);
                }
            }
}

// The yardsticks of bench/kernels.py: how much they say they did, and that memory is read.
void yardsticks(const Kernels& k, Trace& t) {
    t.at("yardsticks");
    Random r(3);
    std::vector<int32_t> memory(64 * 5);
    uint32_t sum = 0;
    for (int32_t& v : memory) sum += (uint32_t)(v = (int32_t)r.bits());
    t.expect(k.read_memory(memory.data(), (int64_t)memory.size() * 4) == (int32_t)sum, "read_memory reads all of it");
    t.expect(k.int8_peak(7) > 0 && k.int8_peak(7) % 7 == 0 && k.float_peak(7) > 0 && k.float_peak(7) % 7 == 0, "peaks count every iteration");
}

// Error bounds of the functions that the kernels share: 1 ulp = 2^-23 of the value's power of two.
void functions(Trace& t) {
    t.at("functions");
    auto ulps = [](double got, double want) { int e; std::frexp(want, &e); return std::fabs(got - want) / std::ldexp(1.0, std::max(e, -125) - 24); };
    double worst_exp = 0, worst_tanh = 0, worst_sin = 0;
    for (int i = 0; i <= 200000; i++) {
        const float x = -87.0f + 175.0f * (float)i / 200000.0f, y = 20.0f * (float)i / 200000.0f;
        worst_exp = std::max(worst_exp, ulps(math::vexp(math::vset(x)).v[0], std::exp((double)x)));
        worst_tanh = std::max(worst_tanh, ulps(math::vtanh(math::vset(-y)).v[0], std::tanh(-(double)y)));
        const double angle = (i % 2 ? 1e6 : -10.0) * i / 200000.0;
        double s, c;
        math::sin_cos(angle, &s, &c);
        worst_sin = std::max({worst_sin, std::fabs(s - std::sin(angle)), std::fabs(c - std::cos(angle))});
    }
    if (worst_exp > 3) t.fail("exp is %.3g ulp off", worst_exp);
    if (worst_tanh > 4) t.fail("tanh is %.3g ulp off", worst_tanh);
    if (worst_sin > 1e-15) t.fail("sin or cos is %.3g off", worst_sin);
    auto exp1 = [](float x) { return math::vexp(math::vset(x)).v[0]; };
    auto tanh1 = [](float x) { return math::vtanh(math::vset(x)).v[0]; };
    t.expect(exp1(0.0f) == 1.0f && exp1(-INFINITY) == 0.0f && exp1(-87.1f) == 0.0f && exp1(INFINITY) == exp1(88.0f) && std::isnan(exp1(NAN)), "exp at its ends");
    t.expect(tanh1(0.0f) == 0.0f && tanh1(INFINITY) == 1.0f && tanh1(-INFINITY) == -1.0f && std::isnan(tanh1(NAN)), "tanh at its ends");
}

// --- groups -----------------------------------------------------------------------------------------------------------------

struct Group { const char* name; void (*run)(const Kernels&, Trace&); };
constexpr Group GROUPS[] = {{"linear_i8", linear_i8}, {"grouped", linear_grouped}, {"inflate", inflate}, {"scale_partial_sums", scale_partial_sums}, {"retile", retile}, {"linear_f32", linear_f32}, {"linear_f16", linear_f16}, {"quantise", quantise}, {"rotate", rotate}, {"norms", norms}, {"rope", rope}, {"elementwise", elementwise},
                            {"softmax", softmax}, {"score", score}, {"quantise_weights", quantise_weights}, {"gather", gather}, {"kv_append", kv_append}, {"attention", attention}, {"halves", halves}, {"experts", experts}, {"yardsticks", yardsticks}, {"ops", ops}};

bool report(const char* group, const char* isa, const Trace& t) {   // "group isa ok digest", or "group isa FAILED why"
    const bool ok = t.failure.empty();
    if (ok && t.words.empty()) std::printf("%-12s %-9s ok\n", group, isa);
    else if (ok) std::printf("%-12s %-9s ok %016llx\n", group, isa, (unsigned long long)t.digest());
    else std::printf("%-12s %-9s FAILED %s\n", group, isa, t.failure.c_str());
    std::fflush(stdout);
    return ok;
}

int test_all() {
    bool good = true;
    const char* names[8];
    const int count = kernel_names(names, 8);
    for (const Group& g : GROUPS) {
        choose_kernels("portable");
        Trace portable(true);
        g.run(*kernels(), portable);
        good &= report(g.name, "portable", portable);
        for (int i = 0; i < count; i++) {
            if (!std::strcmp(names[i], "portable")) continue;
            choose_kernels(names[i]);
            Trace t(false);
            g.run(*kernels(), t);
            t.must_equal(portable);
            good &= report(g.name, names[i], t);
        }
    }
    choose_kernels("best");
    Trace f(true), p(true);
    functions(f);
    pool(p);
    good &= report("functions", "-", f);
    good &= report("pool", kernels()->name, p);
    return good ? 0 : 1;
}

int test_one(const char* isa) {
    if (!choose_kernels(isa)) { std::fprintf(stderr, "test_kernels: %s does not run on this processor\n", isa); return 1; }
    bool good = true;
    for (const Group& g : GROUPS) {
        Trace t(true);
        g.run(*kernels(), t);
        good &= report(g.name, isa, t);
    }
    return good ? 0 : 1;
}

}  // namespace
}  // namespace ork::test

int main(int argc, char** argv) {
    if (argc == 1) return ork::test::test_all();
    if (argc == 3 && !std::strcmp(argv[1], "--isa")) return ork::test::test_one(argv[2]);
    std::fprintf(stderr, "usage: test_kernels [--isa NAME]\n");
    return 2;
}

#include "experts.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include "pool.h"

namespace ork {
namespace {

// The k best of n scores by insertion, equal ones by number.
void best(const float* score, int64_t n, int64_t k, int32_t* out) {
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        if (held == k && !(score[i] > score[out[k - 1]])) continue;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && score[i] > score[out[at - 1]]; at--) out[at] = out[at - 1];
        out[at] = (int32_t)i;
    }
}

// Experts outside of the chosen groups get a score that never wins.
void keep_groups(const Routing& r, int64_t n, float* score) {
    const int64_t size = n / r.groups;
    float sums[EXPERTS_MAX];
    int32_t chosen[EXPERTS_MAX];
    for (int64_t g = 0; g < r.groups; g++) {
        int32_t two[2];
        const int64_t count = size < 2 ? size : 2;
        best(score + g * size, size, count, two);
        sums[g] = score[g * size + two[0]] + (count == 2 ? score[g * size + two[1]] : 0.0f);
    }
    best(sums, r.groups, r.used, chosen);
    std::sort(chosen, chosen + r.used);
    for (int64_t g = 0, c = 0; g < r.groups; g++) {
        if (c < r.used && chosen[c] == g) { c++; continue; }
        for (int64_t i = g * size; i < (g + 1) * size; i++) score[i] = -INFINITY;
    }
}

constexpr float LEAST_SUM = 6.103515625e-5f;   // of weights that are normalised, as in llama.cpp

bool route_row(const Kernels* k, const float* logits, int64_t n, const Routing& r, int32_t* ids, float* weights) {
    for (int64_t i = 0; i < n; i++)
        if (!std::isfinite(logits[i])) return false;
    float probs[EXPERTS_MAX], score[EXPERTS_MAX];
    if (r.sigmoid) k->sigmoid(logits, n, probs);
    else k->softmax(logits, n, 1.0f, probs);
    for (int64_t i = 0; i < n; i++) score[i] = r.bias ? probs[i] + r.bias[i] : probs[i];
    if (r.groups > 1) keep_groups(r, n, score);
    best(score, n, r.top_k, ids);
    std::sort(ids, ids + r.top_k);
    float sum = 0.0f;
    for (int64_t i = 0; i < r.top_k; i++) sum = sum + probs[ids[i]];
    for (int64_t i = 0; i < r.top_k; i++) {
        const float w = r.normalise ? probs[ids[i]] / (sum > LEAST_SUM ? sum : LEAST_SUM) : probs[ids[i]];
        weights[i] = w * r.scale;
    }
    return true;
}

}  // namespace

int64_t op_route(const Mat& logits, const Routing& r, Routes& out) {
    const Kernels* k = kernels();
    const int64_t M = logits.rows, n = logits.cols, top = r.top_k;
    out.rows = M, out.experts = n, out.top_k = top;
    out.ids.resize(M * top), out.weights.resize(M * top), out.places.resize(M * top), out.sources.resize(M * top);
    std::atomic<int64_t> bad{M};
    by_rows(M, 8 * n, [&](int64_t b, int64_t e) {
        for (int64_t m = b; m < e; m++) {
            if (route_row(k, logits.data + m * logits.stride, n, r, &out.ids[m * top], &out.weights[m * top])) continue;
            for (int64_t first = bad; m < first && !bad.compare_exchange_weak(first, m);) {}
            return;
        }
    });
    if (bad < M) return bad;
    out.offsets.assign(n + 1, 0);
    for (int32_t id : out.ids) out.offsets[id + 1]++;
    for (int64_t i = 0; i < n; i++) out.offsets[i + 1] += out.offsets[i];
    std::vector<int32_t> next(out.offsets.begin(), out.offsets.end() - 1);
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = m * top; i < (m + 1) * top; i++) {
            out.places[i] = next[out.ids[i]]++;
            out.sources[out.places[i]] = (int32_t)m;
        }
    return -1;
}

void op_gather_rows(const Rows& rows, const Routes& r, QuantisedRows& out) {
    const int64_t groups = out.groups();
    out.full_range = rows.full_range;
    by_rows(r.gathered(), rows.Kp / 4, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; i++) {
            const int64_t m = r.sources[i];
            std::memcpy(out.codes + i * rows.Kp, rows.codes + m * rows.Kp, (size_t)rows.Kp);
            std::memcpy(out.scales + i * groups, rows.scales + m * groups, sizeof(float) * groups);
            std::memcpy(out.sums + i * groups, rows.sums + m * groups, sizeof(int32_t) * groups);
        }
    });
}

void op_gather_floats(const Mat& x, const Routes& r, const Mat& out) {
    by_rows(r.gathered(), x.cols, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; i++) std::memcpy(out.data + i * out.stride, x.data + r.sources[i] * x.stride, sizeof(float) * x.stride);
    });
}

void op_linear_experts(const Mat& x, const Rows* rows, const std::vector<ExpertJob>& jobs) {
    // Runs of a job's blocks, each a similar share of the work: its rows, and reading a block whatever they are.
    constexpr int64_t READING = 8;   // rows that take as long as unpacking a block
    struct Part { int64_t job, begin, end; };
    std::vector<Part> parts;
    auto cost = [&](const ExpertJob& j) { return (j.rows.end - j.rows.begin + READING) * j.slice.Kp * (j.slice.n / column_blocks(j.slice, rows).count); };
    int64_t total = 0;
    for (const ExpertJob& j : jobs) total += cost(j) * column_blocks(j.slice, rows).count;
    const int64_t share = total / (8 * pool_threads());
    for (size_t i = 0; i < jobs.size(); i++) {
        const int64_t count = column_blocks(jobs[i].slice, rows).count, run = std::max<int64_t>(1, share / cost(jobs[i]));
        for (int64_t b = 0; b < count; b += run) parts.push_back({(int64_t)i, b, std::min(count, b + run)});
    }
    parallel_chunks((int64_t)parts.size(), 1, [&](int64_t b, int64_t e, int) {
        for (int64_t i = b; i < e; i++) {
            const ExpertJob& j = jobs[parts[i].job];
            linear_blocks(x, rows, j.rows.begin, j.rows.end, j.slice, parts[i].begin, parts[i].end, j.out, nullptr);
        }
    });
}

void op_gate_experts(Gate kind, const Mat& g, const Mat& u, const std::vector<Range>& ranges, const Rotation& rotation, int limit, QuantisedRows* out) {
    const Kernels* k = kernels();
    const RowsOut to = out ? RowsOut{out->codes, out->scales, out->sums, out->Kp, out->group, limit} : RowsOut{};
    for (size_t i = 0; i < ranges.size();) {
        const int64_t begin = ranges[i].begin;
        int64_t end = ranges[i].end;
        for (i++; i < ranges.size() && ranges[i].begin == end; i++) end = ranges[i].end;
        by_rows(begin, end, (8 + rotation.m) * g.cols, [&](int64_t b, int64_t e) {
            k->gate(kind, g, u, b, e, g);
            if (out) k->quantise(g, b, e, rotation, to);
        });
    }
}

void op_weighted_sum(const Mat& y, const Routes& r, const Mat& out) {
    const Kernels* k = kernels();
    by_rows(r.rows, r.top_k * out.cols, [&](int64_t b, int64_t e) { k->weighted_sum(y, r.places.data(), r.weights.data(), r.top_k, b, e, out); });
}

void op_gate_rows(const Mat& x, const float* weight, const Mat& y) {
    const Kernels* k = kernels();
    by_rows(x.rows, 2 * x.cols, [&](int64_t b, int64_t e) { k->gate_rows(x, weight, y, b, e); });
}

}  // namespace ork

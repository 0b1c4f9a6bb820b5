// Mixture of experts: which experts a row goes to, rows gathered by expert, products of many experts in one parallel section,
// their weighted sum.
#pragma once
#include <cstdint>
#include <vector>
#include "ops.h"

namespace ork {

struct Routing {
    int64_t top_k;
    bool sigmoid;          // scores: sigmoid of each logit, or softmax over all
    bool normalise;        // the weights of a row's experts add up to `scale`
    float scale;
    const float* bias;     // added to the scores for the choice alone; null: none
    int64_t groups, used;  // experts come from the `used` groups whose two best scores add up to most; 1, 1: one group
};

// Where rows go. An expert's rows lie together when gathered: by expert ascending, then by row.
struct Routes {
    int64_t rows, experts, top_k;
    std::vector<int32_t> ids;      // [rows][top_k] ascending
    std::vector<float> weights;    // [rows][top_k] of these
    std::vector<int32_t> places;   // [rows][top_k] where the row is among the gathered ones
    std::vector<int32_t> offsets;  // [experts + 1] the gathered rows of each expert
    std::vector<int32_t> sources;  // [rows * top_k] the row that a gathered one is a copy of
    int64_t gathered() const { return rows * top_k; }
};

constexpr int64_t EXPERTS_MAX = 4096;

// -1, or the first row with a logit that is not finite: then `out` means nothing. Equal scores go to the lower number.
int64_t op_route(const Mat& logits, const Routing&, Routes& out);
void op_gather_rows(const Rows& rows, const Routes&, QuantisedRows& out);
void op_gather_floats(const Mat& x, const Routes&, const Mat& out);

struct Range { int64_t begin, end; };   // of gathered rows
struct ExpertJob { Slice slice; Range rows; Mat out; };
// Gathered rows of many experts, each with its own slices, in one parallel section; equal to op_linear of each.
void op_linear_experts(const Mat& x, const Rows* rows, const std::vector<ExpertJob>& jobs);
// g = act(g) * u of these rows, in place, and with `out` also quantised.
void op_gate_experts(Gate kind, const Mat& g, const Mat& u, const std::vector<Range>& ranges, const Rotation&, int limit, QuantisedRows* out);
void op_weighted_sum(const Mat& y, const Routes&, const Mat& out);
void op_gate_rows(const Mat& x, const float* weight, const Mat& y);

}  // namespace ork

// What the kernels work on, and the table of entry points that each instruction set fills in.
// All functions are single-threaded over a range of work; ops.cpp spreads ranges over the pool.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ork {

constexpr int64_t KV_BLOCK = 256;   // positions per KV block: attention merges blocks of this size in order
constexpr int GROUP_I8 = 32;        // output channels whose int8 codes share a 1 KiB tile
constexpr int GROUP_I4 = 64;        // of 4-bit codes
constexpr int GROUP_F32 = 16;       // of floats, f16 too
constexpr int64_t MIX_MAX = 512;    // most blocks that a rotation mixes

enum class Codec : int32_t { f32 = 0, i8 = 1, i4 = 2, nf4 = 3, f16 = 4 };
inline bool is_quantised(Codec c) { return c == Codec::i8 || c == Codec::i4 || c == Codec::nf4; }

// The int8 levels that nf4's codes stand for (docs/pack-format.md).
constexpr int8_t NF4_LEVELS[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};

// A slice of one weight tensor: columns [n0, n0 + n) in the chip's order (docs/pack-format.md).
struct Slice {
    Codec codec;
    const uint8_t* codes;   // [Kp/ks][n/G][ks/32][G][32], 4-bit codes two to a byte, the even k low; f32: [n/16][Kp][16]
    const float* scales;    // f32 [n] of quantised codecs, else null
    const uint16_t* group_scales;   // f16 [n/G][Kp/group][G] if group > 0, else null
    int64_t Kp, ks;         // padded K, and the length of one K slice
    int32_t n0, n;          // first column in the tensor, and the padded count (a multiple of 64)
    int64_t group;          // inputs that share a group scale, a multiple of 32 that divides ks; 0: one scale a channel
};

// Quantised activations: codes [M][Kp]; scales and code sums [M], or [M][Kp/group] where a group has its own.
// With per-channel weights a group need not divide ks: both are multiples of 32.
struct Rows {
    const int8_t* codes;
    const float* scales;
    const int32_t* sums;
    int64_t M, Kp, group;
    bool full_range;        // a code may be -128; our own quantiser never makes one
};

// Where `quantise` puts its rows, meanings as in Rows. Codes lie within +-limit.
struct RowsOut {
    int8_t* codes;
    float* scales;
    int32_t* sums;
    int64_t Kp, group;
    int limit;
};

// Sums [M][n] of rows from m0 on that an NPU left: `count` parts, as many for each group of the rows, that are added up.
struct PartialSums {
    const void* const* parts;   // int32, or int16 if `half`
    int64_t count, row, block;  // element (m, c) of a part lies at (m - m0) * row + c / 64 * block + c % 64
    int64_t m0;
    bool half;
};

// f32 rows: `cols` logical columns, the rest of `stride` (a multiple of 64) is zero.
struct Mat {
    float* data;
    int64_t rows, cols, stride;
};

// Block Hadamard along K: signs f32 [K] of +-1, H_block, then (if mix) Q across the blocks, then 1 / sqrt(block).
struct Rotation {
    const float* signs = nullptr;   // null: no rotation
    int64_t block = 0;              // a power of two that divides K
    const float* mix = nullptr;     // orthogonal Q, f32 [m][m]; null: blocks are not mixed
    int64_t m = 0;                  // K / block, at most MIX_MAX
};

enum class Gate : int32_t { silu = 0, gelu_tanh = 1 };
enum class RopePairs : int32_t { adjacent = 0, halves = 1 };

// Keys lie transposed, [block][head][dim][256], so that scores vectorise across positions with dim ascending;
// values lie [block][head][256][dim_v]. dim_v is dim padded to 16. Elements are f16 or f32.
struct KvLayer {
    void* keys;
    void* values;
    bool half;
    int64_t heads, dim, dim_pad;
};

// Consecutive positions of one sequence, handled together.
struct Tile { int32_t row, count, seq, first_position; };

// What short convolutions keep of each KV slot, f16 or f32 [slots][stride]; stride is the width padded to 16.
struct ConvLayer {
    void* inputs;
    bool half;
    int64_t width, stride;
};

struct AttentionArgs {
    Mat q, out;             // [M][heads * dim]
    KvLayer kv;
    const Tile* tiles;
    const int32_t* block_table;  // [seqs][table_stride]
    int64_t table_stride;
    int64_t heads;          // query heads
    int64_t window;         // 0: all; else a position sees itself and the window - 1 before it
    float scale, softcap;   // softcap 0: none
};

// How weights become codes (kernels_quant.inl): `ratios` of absmax to try as the largest level's value besides absmax
// itself, then `refine` rounds of least squares; 2^headroom is the quotient of a grouped row's own scale and its channel's.
struct QuantWeights {
    Codec codec;            // i8, i4 or nf4
    int64_t K, Kp, group;   // group: a multiple of 32 that divides K, or 0: one scale a row
    const float* weight;    // of squared errors, f32 [K] and zeros up to a multiple of 16; null: all alike
    const float* ratios;
    int64_t ratio_count;
    int refine, headroom;
};

// Partial result of a tile and KV head over one block: per query vector max, sum and unnormalised output.
struct Partial { float* max; float* sum; float* out; };

struct Kernels {
    const char* name;
    // out[m][n0 + n] = float(sum_k a[m][k] * w[k][n]) * (scale_a[m] * scale_w[n]) (+ bias), groups [g0, g1) of 32 columns
    void (*linear_i8)(const Rows&, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
    void (*accumulate_i8)(const Rows&, const Slice&, int64_t g0, int64_t g1, int32_t* out, int64_t stride);
    // What linear_i8, or linear_grouped where rows have groups, makes of sums that were made elsewhere.
    void (*scale_partial_sums)(const PartialSums&, int64_t m0, int64_t m1, const Rows&, const Slice&, const Mat& out, const float* bias);
    void (*linear_f32)(const Mat& x, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
    void (*linear_f16)(const Mat& x, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
    void (*quantise)(const Mat& x, int64_t m0, int64_t m1, const Rotation&, const RowsOut&);
    void (*rotate)(float* rows, int64_t count, int64_t stride, int64_t K, const Rotation&, bool inverse);
    void (*rms_norm)(const Mat& x, int64_t m0, int64_t m1, const float* weight, float eps, const Mat& out);
    void (*head_norm)(const Mat& x, int64_t m0, int64_t m1, int64_t dim, const float* weight, float eps);
    void (*rope)(const Mat& x, int64_t m0, int64_t m1, int64_t dim, int64_t rotated, RopePairs, const float* cos_sin, int64_t table_stride);
    void (*rope_table)(const int32_t* positions, int64_t m0, int64_t m1, const double* inv_freq, int64_t count, float magnitude, float* cos_sin, int64_t stride);
    void (*gate)(Gate, const Mat& g, const Mat& u, int64_t m0, int64_t m1, const Mat& out);
    void (*add)(const Mat& a, const Mat& b, int64_t m0, int64_t m1, const Mat& out);
    void (*scale)(const Mat& x, int64_t m0, int64_t m1, float factor);
    void (*softcap)(const Mat& x, int64_t m0, int64_t m1, float cap);
    void (*gather)(const Slice&, int64_t column, int64_t K, const Rotation&, float* out);   // f32 and f16 are never rotated
    void (*kv_append)(const KvLayer&, const Mat& k, const Mat& v, const int32_t* slots, int64_t h0, int64_t h1);
    int64_t (*attention_scratch)(const AttentionArgs&, int64_t tile_rows);   // floats a worker needs
    void (*attention_block)(const AttentionArgs&, const Tile&, int64_t kv_head, int64_t block, float* scratch, const Partial&);
    void (*attention_merge)(const AttentionArgs&, const Tile&, const Partial& into, const Partial& from);
    void (*attention_finish)(const AttentionArgs&, const Tile&, int64_t kv_head, const Partial&);
    void (*softmax)(const float* x, int64_t n, float inv_temperature, float* out);   // one row; sums in lanes
    void (*top)(const float* x, int64_t n, float* largest, int64_t* index);   // the first of the largest
    // e^(p - shift) summed, and with q also e^(p - shift) * (p - q), in double precision (kernels_score.inl)
    void (*exp_sums)(const float* p, const float* q, int64_t n, float shift, double* sums);
    int64_t (*quantise_weights)(const QuantWeights&, const float* rows, int64_t n, int8_t* codes, float* channel, uint16_t* groups);
    // The machine's own limits, for benchmarks: multiply-adds done in registers alone, and a plain read of memory.
    int64_t (*int8_peak)(int64_t iterations);
    int64_t (*float_peak)(int64_t iterations);
    int32_t (*read_memory)(const void* p, int64_t bytes);
    // 4-bit codecs, and any codec where Rows.group > 0; groups [g0, g1) of 64 columns:
    // out = channel * S (+ bias), S = fma over groups ascending from 0 of float(int32_g) * (a[m,g] * float(group scale)).
    void (*linear_grouped)(const Rows&, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
    // The sums themselves, out[m][group][n0 + n], rows `stride` apart; one group where rows have none.
    void (*accumulate_grouped)(const Rows&, const Slice&, int64_t g0, int64_t g1, int32_t* out, int64_t stride);
    // `tiles` whole 4-bit tiles (64 channels by 32 inputs, 1 KiB) -> the int8 tiles of the same codes, two 32 x 32 a 4-bit one:
    // dst[0] and dst[1] hold channels 0-31 and 32-63, 1 KiB a tile each.
    void (*inflate)(Codec, const uint8_t* src, int64_t tiles, int8_t* dst0, int8_t* dst1);
    // kernels_experts.inl: out[m] = sum of weights[m][i] * y[places[m][i]] over i < count ascending, fma from 0.
    void (*sigmoid)(const float* x, int64_t n, float* out);
    void (*weighted_sum)(const Mat& y, const int32_t* places, const float* weights, int64_t count, int64_t m0, int64_t m1, const Mat& out);
    void (*gate_rows)(const Mat& x, const float* weight, const Mat& y, int64_t m0, int64_t m1);
    void (*conv_append)(const ConvLayer&, const Mat& bcx, const int32_t* slots, int64_t m0, int64_t m1);
    void (*short_conv)(const ConvLayer&, const float* bcx, const Mat& taps, const int32_t* slots, float* out);   // a row
};

const Kernels* kernels();                       // the best that this processor runs, or the chosen one
bool choose_kernels(const char* name);          // false: unknown or not runnable here
int kernel_names(const char** out, int cap);    // those runnable here, best first

}  // namespace ork

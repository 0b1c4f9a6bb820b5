// What the kernels work on, and the table of entry points that each instruction set fills in.
// All functions are single-threaded over a range of work; ops.cpp spreads ranges over the pool.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ork {

constexpr int64_t KV_BLOCK = 256;   // positions per KV block: attention merges blocks of this size in order
constexpr int GROUP_I8 = 32;        // output channels whose int8 codes share a 1 KiB tile
constexpr int GROUP_F32 = 16;

enum class Codec : int32_t { f32 = 0, i8 = 1 };

// A slice of one weight tensor: columns [n0, n0 + n) in the chip's order (docs/pack-format.md).
struct Slice {
    Codec codec;
    const uint8_t* codes;   // i8: [Kp/ks][n/32][ks/32][32][32]; f32: [n/16][Kp][16]
    const float* scales;    // f32 [n], i8 only
    int64_t Kp, ks;         // padded K, and the length of one K slice
    int32_t n0, n;          // first column in the tensor, and the padded count (a multiple of 64)
};

// Quantised activations: codes [M][Kp], one scale and one code sum a row.
struct Rows {
    const int8_t* codes;
    const float* scales;
    const int32_t* sums;
    int64_t M, Kp;
    bool full_range;        // a code may be -128; our own quantiser never makes one
};

// f32 rows: `cols` logical columns, the rest of `stride` (a multiple of 64) is zero.
struct Mat {
    float* data;
    int64_t rows, cols, stride;
};

// Block Hadamard along K: signs f32 [K] of +-1, then H_block / sqrt(block).
struct Rotation {
    const float* signs;     // null: no rotation
    int64_t block;          // a power of two that divides K
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

// Partial result of a tile and KV head over one block: per query vector max, sum and unnormalised output.
struct Partial { float* max; float* sum; float* out; };

struct Kernels {
    const char* name;
    // out[m][n0 + n] = float(sum_k a[m][k] * w[k][n]) * (scale_a[m] * scale_w[n]) (+ bias), groups [g0, g1) of 32 columns
    void (*linear_i8)(const Rows&, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
    void (*accumulate_i8)(const Rows&, const Slice&, int64_t g0, int64_t g1, int32_t* out, int64_t stride);
    // The second half of linear_i8 for sums that were made elsewhere: parts[i][m][c] added up, then scaled as there.
    void (*scale_sums)(const int32_t* const* parts, int64_t count, int64_t pitch, int64_t m0, int64_t m1, const float* scales_a, const float* scales_w,
                       int64_t n0, int64_t n, const Mat& out, const float* bias);
    void (*linear_f32)(const Mat& x, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
    void (*quantise)(const Mat& x, int64_t m0, int64_t m1, const Rotation&, int8_t* codes, int64_t Kp, float* scales, int32_t* sums);
    void (*rotate)(float* rows, int64_t count, int64_t stride, int64_t K, const Rotation&, bool inverse);
    void (*rms_norm)(const Mat& x, int64_t m0, int64_t m1, const float* weight, float eps, const Mat& out);
    void (*head_norm)(const Mat& x, int64_t m0, int64_t m1, int64_t dim, const float* weight, float eps);
    void (*rope)(const Mat& x, int64_t m0, int64_t m1, int64_t dim, int64_t rotated, RopePairs, const float* cos_sin, int64_t table_stride);
    void (*rope_table)(const int32_t* positions, int64_t m0, int64_t m1, const double* inv_freq, int64_t count, float magnitude, float* cos_sin, int64_t stride);
    void (*gate)(Gate, const Mat& g, const Mat& u, int64_t m0, int64_t m1, const Mat& out);
    void (*add)(const Mat& a, const Mat& b, int64_t m0, int64_t m1, const Mat& out);
    void (*scale)(const Mat& x, int64_t m0, int64_t m1, float factor);
    void (*softcap)(const Mat& x, int64_t m0, int64_t m1, float cap);
    void (*gather_i8)(const Slice&, int64_t column, int64_t K, const Rotation&, float* out);
    void (*gather_f32)(const Slice&, int64_t column, int64_t K, float* out);
    void (*kv_append)(const KvLayer&, const Mat& k, const Mat& v, const int32_t* slots, int64_t h0, int64_t h1);
    int64_t (*attention_scratch)(const AttentionArgs&, int64_t tile_rows);   // floats a worker needs
    void (*attention_block)(const AttentionArgs&, const Tile&, int64_t kv_head, int64_t block, float* scratch, const Partial&);
    void (*attention_merge)(const AttentionArgs&, const Tile&, const Partial& into, const Partial& from);
    void (*attention_finish)(const AttentionArgs&, const Tile&, int64_t kv_head, const Partial&);
    void (*softmax)(const float* x, int64_t n, float inv_temperature, float* out);   // one row; sums in lanes
    // The machine's own limits, for benchmarks: multiply-adds done in registers alone, and a plain read of memory.
    int64_t (*int8_peak)(int64_t iterations);
    int64_t (*float_peak)(int64_t iterations);
    int32_t (*read_memory)(const void* p, int64_t bytes);
};

const Kernels* kernels();                       // the best that this processor runs, or the chosen one
bool choose_kernels(const char* name);          // false: unknown or not runnable here
int kernel_names(const char** out, int cap);    // those runnable here, best first

}  // namespace ork

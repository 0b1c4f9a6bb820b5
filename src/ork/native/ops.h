// The operations that devices/cpu.py calls: the kernels spread over the pool, on buffers that Python holds opaquely.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
#include "kernels.h"

namespace ork {

// Aligned memory from a free list by size: a forward pass makes hundreds of short-lived arrays of a few sizes.
class Buffer {
  public:
    explicit Buffer(size_t bytes);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    char* data() const { return data_; }

  private:
    char* data_;
    size_t bytes_;
};

// f32 [rows][cols], each row padded with zeros to a multiple of 64 columns.
class Array {
  public:
    Array(int64_t rows, int64_t cols);
    Mat mat() const { return {(float*)buffer_.data(), rows, cols, stride}; }
    const int64_t rows, cols, stride;

  private:
    Buffer buffer_;
};

class QuantisedRows {
  public:
    QuantisedRows(int64_t M, int64_t Kp, int64_t group = 0);
    Rows view() const { return {codes, scales, sums, M, Kp, group, full_range}; }
    int64_t groups() const { return group ? Kp / group : 1; }   // scales and sums a row
    const int64_t M, Kp, group;
    bool full_range = false;
    int8_t* codes;
    float* scales;
    int32_t* sums;

  private:
    Buffer buffer_;
};

// A batch of rows: positions, KV slots, and runs of consecutive positions of one sequence.
struct Batch {
    std::vector<int32_t> positions, slots, table;
    std::vector<Tile> runs;
    int64_t table_stride = 0;
};

// K and V of every layer, in blocks of 256 positions; pages come into being when first written.
class KvCache {
  public:
    KvCache(int64_t layers, int64_t heads, int64_t dim, int64_t blocks, bool half);
    ~KvCache();
    KvCache(const KvCache&) = delete;
    KvCache& operator=(const KvCache&) = delete;
    KvLayer layer(int64_t i) const;
    int64_t block_bytes() const;   // of one block in all layers
    const int64_t layers, heads, dim, blocks;
    const bool half;

  private:
    int64_t key_bytes() const;
    int64_t value_bytes() const;
    char* memory_;
    size_t bytes_;
};

struct LinearJob { Slice slice; Mat out; const float* bias; };

// A slice's blocks of columns, which kernels take whole, and the shares of one, each of as many bytes: threads get equal shares.
struct Blocks { int64_t count, shares; };
Blocks column_blocks(const Slice&, const Rows*);
// Rows [m0, m1) with blocks [g0, g1) by the kernel that fits, on the caller's thread.
void linear_blocks(const Mat& x, const Rows* rows, int64_t m0, int64_t m1, const Slice&, int64_t g0, int64_t g1, const Mat& out, const float* bias);
void op_linear(const Mat& x, const Rows* rows, const std::vector<LinearJob>& jobs);
void op_accumulate(const Rows& rows, const Slice& slice, int32_t* out, int64_t stride);
// Sums of int8 rows `pitch` apart with one weight block [N/32][K/32][32][32], for the emulator: out[m][n], rows out_pitch apart.
void op_accumulate_at(const int8_t* a, int64_t pitch, int64_t M, int64_t K, const uint8_t* w, int64_t N, int32_t* out, int64_t out_pitch);
void op_quantise(const Mat& x, const Rotation& rotation, int limit, QuantisedRows& out);
// 4-bit codes [runs][tiles][64][32] -> int8 [2 runs][tiles][32][32].
void op_inflate(Codec codec, const uint8_t* src, int64_t runs, int64_t tiles, int8_t* dst);
void op_rms_norm(const Mat& x, const float* weight, float eps, const Mat& out);
void op_head_norm(const Mat& x, int64_t dim, const float* weight, float eps);
void op_rope_table(const Batch& batch, const std::vector<double>& inv_freq, float magnitude, const Mat& out);
void op_rope(const Mat& x, int64_t dim, int64_t rotated, RopePairs pairs, const Mat& table);
void op_gate(Gate kind, const Mat& g, const Mat& u, const Mat& out);
void op_add(const Mat& a, const Mat& b, const Mat& out);
void op_scale(const Mat& x, float factor);
void op_softcap(const Mat& x, float cap);
void op_gather(const std::vector<Slice>& slices, const int32_t* ids, int64_t count, int64_t K, const Rotation& rotation, const Mat& out);
// Benchmarks: seconds of a parallel run of the machine's own limits (see Kernels), every worker doing the same.
double op_peak(bool integers, int64_t iterations, int64_t* multiply_adds);
void op_read(const void* p, int64_t bytes);
void op_attention(const KvLayer& kv, const Batch& batch, const Mat& q, const Mat& k, const Mat& v, int64_t heads, float scale, int64_t window, float softcap, const Mat& out);

}  // namespace ork

// Causal depth-wise convolutions over the last few positions of a sequence (LFM2's "short convolutions").
#pragma once
#include <cstdint>
#include "ops.h"

namespace ork {

constexpr int64_t TAPS_MAX = 16;

// The inputs of every position of every such layer, by KV slot: what truncates, batches or cuts keys does it to them too.
// Pages come into being when first written.
class ConvCache {
  public:
    ConvCache(int64_t layers, int64_t width, int64_t blocks, bool half);
    ~ConvCache();
    ConvCache(const ConvCache&) = delete;
    ConvCache& operator=(const ConvCache&) = delete;
    ConvLayer layer(int64_t i) const;
    int64_t block_bytes() const;   // of one block in all layers
    const int64_t layers, width, blocks;
    const bool half;

  private:
    char* memory_;
    size_t bytes_;
};

// Rows [b | c | x], each part layer.width wide -> c * conv(b * x), and b * x is kept. `taps` [T][width], the last is the row's own.
void op_short_conv(const ConvLayer&, const Batch&, const Mat& bcx, const Mat& taps, const Mat& out);

}  // namespace ork

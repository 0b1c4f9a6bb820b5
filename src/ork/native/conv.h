// Causal depth-wise convolutions over the last few positions of a sequence (LFM2's "short convolutions").
#pragma once
#include <cstdint>
#include "ops.h"

namespace ork {

constexpr int64_t TAPS_MAX = 16;

// The inputs of positions of every such layer, by KV slot: what truncates, batches or cuts keys does it to them too.
// Pages come into being when first written, and go when their block is cooled: a position looks back over a few, and a
// sequence is seldom cut far back, so that of most blocks their last rows are enough.
class ConvCache {
  public:
    ConvCache(int64_t layers, int64_t width, int64_t blocks, bool half);
    ~ConvCache();
    ConvCache(const ConvCache&) = delete;
    ConvCache& operator=(const ConvCache&) = delete;
    ConvLayer layer(int64_t i) const;
    int64_t block_bytes() const;   // of one block in all layers
    int64_t cold_bytes(int64_t rows) const;   // at most, of one that was cooled
    void cool(int64_t block, int64_t rows);   // gives back the pages of all but its last `rows`
    const int64_t layers, width, blocks;
    const bool half;

  private:
    char* memory_;
    size_t bytes_;
};

// Rows [b | c | x], each part layer.width wide -> c * conv(b * x), and b * x is kept. `taps` [T][width], the last is the row's own.
void op_short_conv(const ConvLayer&, const Batch&, const Mat& bcx, const Mat& taps, const Mat& out);

}  // namespace ork

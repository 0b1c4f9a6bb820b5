// GPTQ's inner loop: columns are rounded in order, and each error is handed to the columns behind it in the block.
#pragma once
#include <cstdint>
#include "kernels.h"

namespace ork {

constexpr int64_t GPTQ_BLOCK_MAX = 128;

struct GptqBlock {
    Codec codec;          // i8, i4, nf4
    float* work;          // [n][K]: rows with the errors so far made up for; read and changed in [begin, block_end)
    const float* upper;   // [K][K]: H^-1 = U'U
    const float* scales;  // [n]: what level 1 is worth in columns [begin, end); 0: all codes mean 0
    int8_t* codes;        // [n][Kp]: written in [begin, end)
    float* errors;        // [n][block_end - block_begin]: (w - level * scale) / U[j][j] of columns [begin, end)
    int64_t n, K, Kp, block_begin, begin, end, block_end;
};

// code = round half to even of w * (1 / scale), within the codec; the nearest level for nf4, the upper one at a tie.
void gptq_round(const GptqBlock& b);

}  // namespace ork

#include "gptq.h"

#include <algorithm>

namespace ork {
namespace {

constexpr int R = 32;   // rows at a time: lanes of the loops below
constexpr float MAGIC = 12582912.0f;   // 1.5 * 2^23: adding and taking it away rounds to even, below 2^22

// The codes of t, and the levels they mean.
template <Codec C> void nearest(const float* t, int8_t* codes, float* levels) {
    if constexpr (C == Codec::nf4) {
        float level[R];
        int32_t code[R];
        for (int r = 0; r < R; r++) { level[r] = (float)NF4_LEVELS[0]; code[r] = 0; }
        for (int i = 1; i < 16; i++) {
            const float middle = 0.5f * (float)(NF4_LEVELS[i - 1] + NF4_LEVELS[i]), value = (float)NF4_LEVELS[i];
            for (int r = 0; r < R; r++) {
                level[r] = t[r] >= middle ? value : level[r];
                code[r] += t[r] >= middle;
            }
        }
        for (int r = 0; r < R; r++) { levels[r] = level[r]; codes[r] = (int8_t)code[r]; }
    } else {
        constexpr float top = C == Codec::i4 ? 7.0f : 127.0f;
        for (int r = 0; r < R; r++) {
            const float x = std::min(std::max(t[r], -top), top);
            levels[r] = (x + MAGIC) - MAGIC;
            codes[r] = (int8_t)levels[r];
        }
    }
}

template <Codec C> void rounded(const GptqBlock& b) {
    const int64_t width = b.block_end - b.begin, block = b.block_end - b.block_begin;
    float w[GPTQ_BLOCK_MAX][R], errors[R], levels[R], t[R], scale[R], inverse[R];
    int8_t codes[R];
    for (int64_t first = 0; first < b.n; first += R) {
        const int rows = (int)std::min<int64_t>(R, b.n - first);
        for (int r = 0; r < R; r++) {
            scale[r] = r < rows ? b.scales[first + r] : 0.0f;
            inverse[r] = scale[r] == 0 ? 0.0f : 1.0f / scale[r];
            const float* row = b.work + (first + r) * b.K + b.begin;
            for (int64_t k = 0; k < width; k++) w[k][r] = r < rows ? row[k] : 0.0f;
        }
        for (int64_t j = b.begin; j < b.end; j++) {
            const float* u = b.upper + j * b.K + b.begin;   // of columns [begin, block_end)
            const int64_t at = j - b.begin;
            const float diagonal = u[at];
            for (int r = 0; r < R; r++) t[r] = w[at][r] * inverse[r];
            nearest<C>(t, codes, levels);
            for (int r = 0; r < R; r++) errors[r] = (w[at][r] - levels[r] * scale[r]) / diagonal;
            for (int64_t k = at + 1; k < width; k++) {
                const float factor = u[k];
                for (int r = 0; r < R; r++) w[k][r] -= errors[r] * factor;
            }
            for (int r = 0; r < rows; r++) {
                b.codes[(first + r) * b.Kp + j] = codes[r];
                b.errors[(first + r) * block + j - b.block_begin] = errors[r];
            }
        }
        for (int r = 0; r < rows; r++) {
            float* row = b.work + (first + r) * b.K + b.begin;
            for (int64_t k = b.end - b.begin; k < width; k++) row[k] = w[k][r];
        }
    }
}

}  // namespace

void gptq_round(const GptqBlock& b) {
    if (b.codec == Codec::nf4) rounded<Codec::nf4>(b);
    else if (b.codec == Codec::i4) rounded<Codec::i4>(b);
    else rounded<Codec::i8>(b);
}

}  // namespace ork

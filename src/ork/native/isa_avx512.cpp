// The kernels compiled for one instruction set (avx512).
#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include "kernels.h"

namespace ork::isa_avx512 {
namespace {
#include "v16_avx512.h"
#include "dot_avx512.h"
#include "panel_avx512.h"
constexpr int F32_ROWS = 8, ATT_ROWS = 8, ATT_NV = 2, PEAK_CHAINS = 12;   // what fits the registers
#include "kernels_math.inl"
#include "kernels_rows.inl"
#include "kernels_half.inl"
#include "kernels_experts.inl"
#include "kernels_linear.inl"
#include "kernels_grouped.inl"
#include "kernels_sums.inl"
#include "kernels_attention.inl"
#include "kernels_score.inl"
#include "kernels_quant.inl"
#include "kernels_peaks.inl"
}  // namespace
#include "kernels_table.inl"
extern const Kernels table;
const Kernels table = ORK_TABLE("avx512");
}  // namespace ork::isa_avx512

// The kernels compiled for one instruction set (neondot).
#include <arm_neon.h>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include "kernels.h"

namespace ork::isa_neondot {
namespace {
#include "v16_neon.h"
#include "dot_neon.h"
#include "panel_neon.h"
constexpr int F32_ROWS = 3, ATT_ROWS = 4, ATT_NV = 1, PEAK_CHAINS = 6;   // what fits the registers
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
const Kernels table = ORK_TABLE("neondot");
}  // namespace ork::isa_neondot

// Tensor types of GGUF files and their expansion to f32, bit-equal to ggml's reference (gguf.quants).
// Block layouts: ggml/src/ggml-common.h and gguf-py/gguf/quants.py of llama.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ork {

// Expands `blocks` consecutive blocks at `src` (any alignment) to `blocks * block` floats at `out`.
using DequantFn = void (*)(const uint8_t* src, float* out, size_t blocks);

struct TensorType {
    uint32_t id;        // enum ggml_type
    const char* name;   // as ggml writes it
    uint32_t block;     // elements in a block
    uint32_t bytes;     // bytes of a block
    DequantFn expand;
};

extern const TensorType kTensorTypes[];
extern const size_t kTensorTypeCount;

const TensorType* find_tensor_type(uint32_t id);  // nullptr if not supported

}  // namespace ork

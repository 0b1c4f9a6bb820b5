// One walk over the string array of a GGUF file.
#pragma once
#include <cstdint>

namespace ork {

// Walks `count` strings, each a little-endian u64 length and that many bytes, from `offset` of `data[0, size)`.
// Fills starts[i] (offset of the first byte in `data`) and lengths[i]. Returns `count` and sets *end to the offset
// behind the last string, or returns the index of the first string that does not lie inside `data` and sets *end to
// the offset of its length field.
uint64_t scan_strings(const uint8_t* data, uint64_t size, uint64_t offset, uint64_t count, uint64_t* starts,
                      uint64_t* lengths, uint64_t* end);

}  // namespace ork

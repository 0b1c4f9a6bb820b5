#include "scan.h"

namespace ork {

uint64_t scan_strings(const uint8_t* data, uint64_t size, uint64_t offset, uint64_t count, uint64_t* starts,
                      uint64_t* lengths, uint64_t* end) {
    *end = offset;
    if (offset > size) return 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t left = size - *end;
        if (left < 8) return i;
        uint64_t length = 0;
        for (int b = 0; b < 8; b++) length |= static_cast<uint64_t>(data[*end + b]) << (8 * b);
        if (length > left - 8) return i;
        starts[i] = *end + 8;
        lengths[i] = length;
        *end += 8 + length;
    }
    return count;
}

}  // namespace ork

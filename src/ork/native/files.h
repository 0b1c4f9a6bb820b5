// Parts of a file into memory, by all threads: for what the page cache holds, where reading is copying.
#pragma once
#include <cstdint>
#include <vector>

namespace ork {

struct FilePart { int64_t offset, nbytes; uint8_t* memory; };

// Whether every byte came; how far the others are is not said. The caller looks at the file to say why one did not.
bool read_parts(int fd, const std::vector<FilePart>& parts);

}  // namespace ork

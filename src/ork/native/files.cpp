#include "files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <unistd.h>

#include "pool.h"

namespace ork {

static constexpr int64_t PIECE = 128 * 1024;  // small enough that threads end together, large enough that calls do not show

static bool read_all(int fd, FilePart p) {
    while (p.nbytes > 0) {
        const ssize_t got = pread(fd, p.memory, (size_t)p.nbytes, p.offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        p.offset += got;
        p.memory += got;
        p.nbytes -= got;
    }
    return true;
}

bool read_parts(int fd, const std::vector<FilePart>& parts) {
    std::vector<FilePart> pieces;
    for (const FilePart& p : parts)
        for (int64_t at = 0; at < p.nbytes; at += PIECE) pieces.push_back({p.offset + at, std::min(PIECE, p.nbytes - at), p.memory + at});
    std::atomic<bool> whole{true};
    parallel_chunks((int64_t)pieces.size(), 1, [&](int64_t b, int64_t e, int) {
        for (int64_t i = b; i < e && whole; i++)
            if (!read_all(fd, pieces[i])) whole = false;
    });
    return whole;
}

}  // namespace ork

/* The C library's calls that reach a device node: those of the NPU, the display's and the dma-heap go to the emulator.
 *
 * Every other call goes straight on. Plain system calls are made with syscall(2), so that nothing here depends on
 * what the loader has resolved already.
 */
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HOOK __attribute__((visibility("default")))

static int failed(int error) {
    errno = error;
    return -1;
}

/* --- open --- */

ORK_HIDDEN int ork_open(int dirfd, const char *path, int flags, mode_t mode) {
    char room[PATH_MAX];
    path = ork_path(dirfd, path, room);
    const char *node = ork_node(path);
    if (!node) return syscall(SYS_openat, dirfd, path, flags, mode);
    if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) return failed(EEXIST);
    if (flags & O_DIRECTORY) return failed(ENOTDIR);
    struct ork_request request = {.op = ORK_OPEN, .value = flags};
    struct ork_reply reply;
    int fd, error = ork_call(&request, (void *)node, strlen(node), 0, &reply, &fd);
    if (error) return failed(error);
    if (!(flags & O_CLOEXEC)) fcntl(fd, F_SETFD, 0);
    return fd;
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                                   \
    HOOK int name(const char *path, int flags, ...) {                \
        va_list rest;                                                \
        va_start(rest, flags);                                       \
        mode_t mode = mode_of(flags, rest);                          \
        va_end(rest);                                                \
        return ork_open(AT_FDCWD, path, flags, mode);                \
    }
#define OPENAT(name)                                                 \
    HOOK int name(int dirfd, const char *path, int flags, ...) {     \
        va_list rest;                                                \
        va_start(rest, flags);                                       \
        mode_t mode = mode_of(flags, rest);                          \
        va_end(rest);                                                \
        return ork_open(dirfd, path, flags, mode);                   \
    }

HOOK int __open_2(const char *path, int flags);  /* what open becomes with _FORTIFY_SOURCE */
HOOK int __open64_2(const char *path, int flags);
HOOK int __openat_2(int dirfd, const char *path, int flags);
HOOK int __openat64_2(int dirfd, const char *path, int flags);

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
int __open_2(const char *path, int flags) { return ork_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return ork_open(AT_FDCWD, path, flags, 0); }
int __openat_2(int dirfd, const char *path, int flags) { return ork_open(dirfd, path, flags, 0); }
int __openat64_2(int dirfd, const char *path, int flags) { return ork_open(dirfd, path, flags, 0); }

/* --- ioctl --- */

HOOK int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *arg = va_arg(rest, void *);
    va_end(rest);
    uint32_t number = (uint32_t)request, type = number >> 8 & 0xff, size = number >> 16 & 0x3fff;
    struct ork_file file;
    /* 'd' DRM, 'H' dma-heap, 'b' dma-buf: the rest is nothing to a node, and a socket refuses it as a node does. */
    if ((type != 'd' && type != 'H' && type != 'b') || !ork_identify(fd, &file))
        return syscall(SYS_ioctl, fd, request, arg);
    struct ork_request asked = {.op = ORK_IOCTL, .file = file.id, .value = number};
    struct ork_reply reply;
    int got, error = ork_call(&asked, arg, number >> 30 & 1 ? size : 0, number >> 31 & 1 ? size : 0, &reply, &got);
    return error ? failed(error) : 0;
}

/* --- mmap, lseek --- */

static void *map(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    struct ork_file file;
    if (fd < 0 || flags & MAP_ANONYMOUS || !ork_identify(fd, &file))
        return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
    struct ork_request request = {.op = ORK_MMAP, .file = file.id, .value = length, .offset = (uint64_t)offset};
    struct ork_reply reply;
    int pages, error = ork_call(&request, NULL, 0, 0, &reply, &pages);
    if (error || pages < 0) {
        errno = error ? error : ENODEV;
        return MAP_FAILED;
    }
    void *at = (void *)syscall(SYS_mmap, address, length, protection, flags, pages, (off_t)reply.offset);
    int mapped = errno;
    close(pages);
    errno = mapped;
    return at;
}

HOOK void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return map(address, length, protection, flags, fd, offset);
}
HOOK void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset) {
    return map(address, length, protection, flags, fd, offset);
}

/* The size of a dma-buf is asked for with lseek. */
static off_t seek(int fd, off_t offset, int whence) {
    struct ork_file file;
    long long bytes;
    off_t at = syscall(SYS_lseek, fd, offset, whence);
    if (at >= 0 || errno != ESPIPE || !ork_identify(fd, &file)) return at;
    if (sscanf(file.what, "dmabuf:%lld", &bytes) != 1) return failed(ESPIPE);
    if (offset || (whence != SEEK_SET && whence != SEEK_END)) return failed(EINVAL);
    return whence == SEEK_END ? bytes : 0;
}
HOOK off_t lseek(int fd, off_t offset, int whence) { return seek(fd, offset, whence); }
HOOK off64_t lseek64(int fd, off64_t offset, int whence) { return seek(fd, offset, whence); }

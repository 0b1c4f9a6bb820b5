/* stat and its kin: a node is the character device it is on a board, and so is a descriptor of one. */
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define HOOK __attribute__((visibility("default")))

enum { DRM_MAJOR = 226, HEAP_MAJOR = 248 };

/* Device number of "/dev/dri/card1": DRM's minors are the numbers in the names. */
static void number_of(const char *node, unsigned *major, unsigned *minor) {
    const char *end = node + strlen(node), *digits = end;
    while (digits > node && digits[-1] >= '0' && digits[-1] <= '9') digits--;
    int drm = strstr(node, "/dri/") != NULL;
    *major = drm ? DRM_MAJOR : HEAP_MAJOR;
    *minor = drm ? atoi(digits) : 0;
}

static void as_node(struct stat *st, const char *node) {
    unsigned major, minor;
    number_of(node, &major, &minor);
    st->st_mode = S_IFCHR | 0660;
    st->st_nlink = 1;
    st->st_size = st->st_blocks = 0;
    st->st_rdev = makedev(major, minor);
}

static void as_file(struct stat *st, const struct ork_file *file) {
    long long bytes;
    char node[sizeof file->what + 1] = "/";
    if (sscanf(file->what, "dmabuf:%lld", &bytes) == 1) {
        st->st_mode = 0600;
        st->st_size = bytes;
    } else {
        as_node(st, strcat(node, file->what));
    }
}

ORK_HIDDEN int ork_stat(int dirfd, const char *path, struct stat *st, int flags) {
    char room[PATH_MAX];
    struct ork_file file;
    int of_descriptor = path && !*path && flags & AT_EMPTY_PATH;
    path = ork_path(dirfd, path, room);
    if (syscall(SYS_newfstatat, dirfd, path, st, flags) < 0) return -1;
    const char *node = ork_node(path);
    if (node) as_node(st, node);
    else if (of_descriptor && S_ISSOCK(st->st_mode) && ork_identify(dirfd, &file)) as_file(st, &file);
    return 0;
}

static int by_descriptor(int fd, struct stat *st) {
    struct ork_file file;
    if (syscall(SYS_fstat, fd, st) < 0) return -1;
    if (S_ISSOCK(st->st_mode) && ork_identify(fd, &file)) as_file(st, &file);
    return 0;
}

/* The 64-bit forms have the same structure on the machines that this is built for. */
_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "64-bit Linux only");

#define FORMS(suffix, type)                                                                            \
    HOOK int stat##suffix(const char *path, struct type *st) {                                         \
        return ork_stat(AT_FDCWD, path, (struct stat *)st, 0);                                         \
    }                                                                                                  \
    HOOK int lstat##suffix(const char *path, struct type *st) {                                        \
        return ork_stat(AT_FDCWD, path, (struct stat *)st, AT_SYMLINK_NOFOLLOW);                       \
    }                                                                                                  \
    HOOK int fstat##suffix(int fd, struct type *st) { return by_descriptor(fd, (struct stat *)st); }   \
    HOOK int fstatat##suffix(int dirfd, const char *path, struct type *st, int flags) {                \
        return ork_stat(dirfd, path, (struct stat *)st, flags);                                        \
    }                                                                                                  \
    HOOK int __xstat##suffix(int version, const char *path, struct type *st);                          \
    HOOK int __lxstat##suffix(int version, const char *path, struct type *st);                         \
    HOOK int __fxstat##suffix(int version, int fd, struct type *st);                                   \
    HOOK int __fxstatat##suffix(int version, int dirfd, const char *path, struct type *st, int flags); \
    int __xstat##suffix(int version, const char *path, struct type *st) {                              \
        (void)version;                                                                                 \
        return ork_stat(AT_FDCWD, path, (struct stat *)st, 0);                                         \
    }                                                                                                  \
    int __lxstat##suffix(int version, const char *path, struct type *st) {                             \
        (void)version;                                                                                 \
        return ork_stat(AT_FDCWD, path, (struct stat *)st, AT_SYMLINK_NOFOLLOW);                       \
    }                                                                                                  \
    int __fxstat##suffix(int version, int fd, struct type *st) {                                       \
        (void)version;                                                                                 \
        return by_descriptor(fd, (struct stat *)st);                                                   \
    }                                                                                                  \
    int __fxstatat##suffix(int version, int dirfd, const char *path, struct type *st, int flags) {     \
        (void)version;                                                                                 \
        return ork_stat(dirfd, path, (struct stat *)st, flags);                                        \
    }

FORMS(, stat)
FORMS(64, stat64)

HOOK int statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *stx) {
    char room[PATH_MAX];
    struct ork_file file;
    struct stat st = {0};
    int of_descriptor = !*path && flags & AT_EMPTY_PATH;
    path = ork_path(dirfd, path, room);
    if (syscall(SYS_statx, dirfd, path, flags, mask, stx) < 0) return -1;
    const char *node = ork_node(path);
    if (node) as_node(&st, node);
    else if (of_descriptor && S_ISSOCK(stx->stx_mode) && ork_identify(dirfd, &file)) as_file(&st, &file);
    else return 0;
    stx->stx_mode = st.st_mode;
    stx->stx_size = st.st_size;
    stx->stx_rdev_major = major(st.st_rdev);
    stx->stx_rdev_minor = minor(st.st_rdev);
    return 0;
}

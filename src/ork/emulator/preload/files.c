/* Calls of the C library that only need to be led to another path, and those that give a path back. */
#include "paths.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HOOK __attribute__((visibility("default")))

/* The next library's function of the same name. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LED(dirfd, path) char room[PATH_MAX]; path = ork_path(dirfd, path, room)

ORK_HIDDEN int ork_open(int dirfd, const char *path, int flags, mode_t mode);

HOOK int access(const char *path, int mode) {
    LED(AT_FDCWD, path);
    return syscall(SYS_faccessat, AT_FDCWD, path, mode);
}
HOOK int faccessat(int dirfd, const char *path, int mode, int flags) {
    LED(dirfd, path);
    return NEXT(faccessat)(dirfd, path, mode, flags);
}
HOOK int euidaccess(const char *path, int mode) {
    LED(AT_FDCWD, path);
    return NEXT(euidaccess)(path, mode);
}
HOOK int eaccess(const char *path, int mode) {
    LED(AT_FDCWD, path);
    return NEXT(eaccess)(path, mode);
}
HOOK int chdir(const char *path) {
    LED(AT_FDCWD, path);
    return syscall(SYS_chdir, path);
}
HOOK DIR *opendir(const char *path) {
    LED(AT_FDCWD, path);
    return NEXT(opendir)(path);
}

/* `ls -l` asks for access lists. */
HOOK ssize_t getxattr(const char *path, const char *name, void *value, size_t size) {
    LED(AT_FDCWD, path);
    return syscall(SYS_getxattr, path, name, value, size);
}
HOOK ssize_t lgetxattr(const char *path, const char *name, void *value, size_t size) {
    LED(AT_FDCWD, path);
    return syscall(SYS_lgetxattr, path, name, value, size);
}
HOOK ssize_t listxattr(const char *path, char *list, size_t size) {
    LED(AT_FDCWD, path);
    return syscall(SYS_listxattr, path, list, size);
}
HOOK ssize_t llistxattr(const char *path, char *list, size_t size) {
    LED(AT_FDCWD, path);
    return syscall(SYS_llistxattr, path, list, size);
}

#define SCANDIR(name, entry)                                                                                     \
    HOOK int name(const char *path, struct entry ***list, int (*wanted)(const struct entry *),                   \
                  int (*order)(const struct entry **, const struct entry **)) {                                  \
        LED(AT_FDCWD, path);                                                                                     \
        return NEXT(name)(path, list, wanted, order);                                                            \
    }
SCANDIR(scandir, dirent)
SCANDIR(scandir64, dirent64)

/* --- streams --- */

static int flags_of(const char *mode) {
    return (strchr(mode, '+') ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY) | (strchr(mode, 'e') ? O_CLOEXEC : 0);
}

static FILE *stream(const char *path, const char *mode, FILE *(*next)(const char *, const char *)) {
    LED(AT_FDCWD, path);
    if (!ork_node(path)) return next(path, mode);
    int fd = ork_open(AT_FDCWD, path, flags_of(mode), 0);
    return fd < 0 ? NULL : fdopen(fd, mode);
}
HOOK FILE *fopen(const char *path, const char *mode) { return stream(path, mode, NEXT(fopen)); }
HOOK FILE *fopen64(const char *path, const char *mode) { return stream(path, mode, NEXT(fopen64)); }

/* --- links and whole paths --- */

/* "/proc/self/fd/7" names a socket of ours: the node, as on a board. */
static ssize_t descriptor_link(const char *path, char *out, size_t size, ssize_t n) {
    struct ork_file file;
    char shown[sizeof file.what + 16];
    const char *name = strrchr(path, '/');
    if (n < 7 || memcmp(out, "socket:", 7) || !name || !strstr(path, "/fd/") || !ork_identify(atoi(name + 1), &file))
        return n;
    snprintf(shown, sizeof shown, "/%s", strncmp(file.what, "dmabuf", 6) ? file.what : "dmabuf:");
    size_t length = strlen(shown);
    memcpy(out, shown, length < size ? length : size);
    return length < size ? length : size;
}

HOOK ssize_t readlinkat(int dirfd, const char *path, char *out, size_t size) {
    LED(dirfd, path);
    if (ork_node(path)) {
        errno = EINVAL;  /* a device, no link */
        return -1;
    }
    return descriptor_link(path, out, size, syscall(SYS_readlinkat, dirfd, path, out, size));
}
HOOK ssize_t readlink(const char *path, char *out, size_t size) { return readlinkat(AT_FDCWD, path, out, size); }

HOOK ssize_t __readlink_chk(const char *path, char *out, size_t size, size_t room);
HOOK ssize_t __readlinkat_chk(int dirfd, const char *path, char *out, size_t size, size_t room);
ssize_t __readlink_chk(const char *path, char *out, size_t size, size_t room) {
    if (size > room) abort();
    return readlinkat(AT_FDCWD, path, out, size);
}
ssize_t __readlinkat_chk(int dirfd, const char *path, char *out, size_t size, size_t room) {
    if (size > room) abort();
    return readlinkat(dirfd, path, out, size);
}

HOOK char *realpath(const char *path, char *out) {
    LED(AT_FDCWD, path);
    const char *node = ork_node(path);
    if (!node) {
        char *found = NEXT(realpath)(path, out);
        if (found) ork_unroot(found);
        return found;
    }
    return out ? strcpy(out, node) : strdup(node);
}
HOOK char *canonicalize_file_name(const char *path) { return realpath(path, NULL); }
HOOK char *__realpath_chk(const char *path, char *out, size_t room);
char *__realpath_chk(const char *path, char *out, size_t room) {
    if (out && room < PATH_MAX) abort();
    return realpath(path, out);
}

#define GLOB(name, list)                                                                                    \
    HOOK int name(const char *pattern, int flags, int (*broken)(const char *, int), list *found) {          \
        LED(AT_FDCWD, pattern);                                                                             \
        int error = NEXT(name)(pattern, flags, broken, found);                                              \
        if (!error && pattern == room)                                                                      \
            for (size_t i = 0; i < found->gl_pathc; i++) ork_unroot(found->gl_pathv[found->gl_offs + i]);   \
        return error;                                                                                       \
    }
#undef glob
#undef glob64
GLOB(glob, glob_t)
GLOB(glob64, glob64_t)

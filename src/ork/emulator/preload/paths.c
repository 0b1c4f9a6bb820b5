/* A board's device nodes and the files around them are a folder that the emulator made; paths are led there.
 *
 * Its folders are real, so opendir, readdir and the like need no more than the path. A node is a link in it.
 */
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *const LED[] = {
    "/dev/dri", "/dev/dma_heap", "/sys/class/drm", "/sys/dev/char/226:", "/sys/devices/platform/fdab0000.npu",
    "/sys/bus/platform/drivers/RKNPU", "/sys/kernel/debug/rknpu", "/proc/device-tree",
    "/sys/firmware/devicetree/base", NULL,
};

/* Collapse "//", "/./" and "/x/.." by the letters alone. 0 if it does not fit. */
static int normal(const char *path, char out[PATH_MAX]) {
    size_t at = 0;
    while (*path) {
        while (*path == '/') path++;
        size_t n = strcspn(path, "/");
        if (n == 2 && path[0] == '.' && path[1] == '.') {
            while (at && out[--at] != '/') {}
        } else if (n && !(n == 1 && path[0] == '.')) {
            if (at + n + 2 > PATH_MAX) return 0;
            out[at++] = '/';
            memcpy(out + at, path, n);
            at += n;
        }
        path += n;
    }
    if (!at) out[at++] = '/';
    out[at] = 0;
    return 1;
}

static int led(const char *path) {
    for (const char *const *known = LED; *known; known++) {
        size_t n = strlen(*known);
        if (!strncmp(path, *known, n) && ((*known)[n - 1] == ':' || !path[n] || path[n] == '/')) return 1;
    }
    return 0;
}

/* Where a relative path starts, if that is in our folder; else 0. */
static int base(int dirfd, char out[PATH_MAX]) {
    long n;
    if (dirfd == AT_FDCWD) {
        n = syscall(SYS_getcwd, out, PATH_MAX) - 1;
    } else {
        char link[40];
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    }
    if (n <= 0) return 0;
    out[n] = 0;
    size_t known = strlen(ork_root());
    return !strncmp(out, ork_root(), known) && out[known] == '/';
}

const char *ork_path(int dirfd, const char *path, char room[PATH_MAX]) {
    char whole[PATH_MAX], clean[PATH_MAX];
    int before = errno;
    if (!path || !*path || !ork_active()) return path;
    if (*path == '/') {
        if (strncmp(path, "/dev", 4) && strncmp(path, "/sys", 4) && strncmp(path, "/proc", 5) && !strstr(path, "/.") &&
            path[1] != '/')
            return path;
        if (!normal(path, clean)) return path;
    } else {
        if (!base(dirfd, whole) || strlen(whole) + strlen(path) + 2 > sizeof whole) {
            errno = before;
            return path;
        }
        strcat(strcat(whole, "/"), path);
        if (!normal(whole, clean)) return path;
        ork_unroot(clean);
    }
    if (!led(clean) || strlen(ork_root()) + strlen(clean) + 1 > PATH_MAX) return path;
    return strcat(strcpy(room, ork_root()), clean);
}

const char *ork_node(const char *path) {
    char target[16];
    size_t known = strlen(ork_root());
    int before = errno;
    if (!path || !ork_active() || strncmp(path, ork_root(), known) || strncmp(path + known, "/dev/", 5)) return NULL;
    long n = syscall(SYS_readlinkat, AT_FDCWD, path, target, sizeof target);
    errno = before;
    return n > 0 ? path + known : NULL;
}

void ork_unroot(char *path) {
    size_t known = strlen(ork_root());
    if (known && !strncmp(path, ork_root(), known) && path[known] == '/')
        memmove(path, path + known, strlen(path + known) + 1);
}

/* A program that starts another with an environment of its own making still starts it under the emulator. */
#include "channel.h"

#include <dlfcn.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HOOK __attribute__((visibility("default")))
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *const NAMES[] = {"LD_PRELOAD=", ORK_SERVER "=", ORK_ROOT "="};
enum { KEPT = sizeof NAMES / sizeof *NAMES };
static char *kept[KEPT];  /* as they were when this process began */

__attribute__((constructor)) static void keep(void) {
    for (int i = 0; i < KEPT; i++) {
        char name[32], *value, *whole;
        snprintf(name, sizeof name, "%.*s", (int)strlen(NAMES[i]) - 1, NAMES[i]);
        if ((value = getenv(name)) && asprintf(&whole, "%s%s", NAMES[i], value) >= 0) kept[i] = whole;
    }
}

static size_t count(char *const env[]) {
    size_t n = 0;
    while (env && env[n]) n++;
    return n;
}

/* `env` with what it lacks of ours; `room` has count(env) + KEPT + 1 places. On the stack: a child after vfork must
 * not allocate. */
static char *const *with_ours(char *const env[], char **room) {
    size_t n = 0;
    if (!ork_active()) return env;
    for (; env && env[n]; n++) room[n] = env[n];
    for (int i = 0; i < KEPT; i++) {
        int there = !kept[i];
        for (size_t j = 0; !there && env && env[j]; j++) there = !strncmp(env[j], NAMES[i], strlen(NAMES[i]));
        if (!there) room[n++] = kept[i];
    }
    room[n] = NULL;
    return room;
}

HOOK int execve(const char *path, char *const argv[], char *const env[]) {
    char *room[count(env) + KEPT + 1];
    return syscall(SYS_execve, path, argv, with_ours(env, room));
}
HOOK int execvpe(const char *file, char *const argv[], char *const env[]) {
    char *room[count(env) + KEPT + 1];
    return NEXT(execvpe)(file, argv, with_ours(env, room));
}
/* A program may have emptied its own environment. */
HOOK int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }
HOOK int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }

#define EXECL(name, call, after)                                                   \
    HOOK int name(const char *path, const char *first, ...) {                      \
        va_list list;                                                              \
        size_t n = 1;                                                              \
        va_start(list, first);                                                     \
        while (va_arg(list, char *)) n++;                                          \
        va_end(list);                                                              \
        char *argv[n + 1];                                                         \
        char *const *env = environ;                                                \
        argv[0] = (char *)first;                                                   \
        va_start(list, first);                                                     \
        for (size_t i = 1; i <= n; i++) argv[i] = va_arg(list, char *);            \
        after;                                                                     \
        va_end(list);                                                              \
        return call(path, argv, env);                                              \
    }
EXECL(execl, execve, )
EXECL(execlp, execvpe, )
EXECL(execle, execve, env = va_arg(list, char *const *))

HOOK int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                     const posix_spawnattr_t *attributes, char *const argv[], char *const env[]) {
    char *room[count(env) + KEPT + 1];
    return NEXT(posix_spawn)(pid, path, actions, attributes, argv, with_ours(env, room));
}
HOOK int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                      const posix_spawnattr_t *attributes, char *const argv[], char *const env[]) {
    char *room[count(env) + KEPT + 1];
    return NEXT(posix_spawnp)(pid, file, actions, attributes, argv, with_ours(env, room));
}

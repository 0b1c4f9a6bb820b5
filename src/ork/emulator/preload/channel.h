/* A thread's connection to the emulator, and what a descriptor of it is. */
#ifndef ORK_CHANNEL_H
#define ORK_CHANNEL_H

#include <stddef.h>
#include "wire.h"

#define ORK_HIDDEN __attribute__((visibility("hidden")))

struct ork_file {
    uint32_t id;
    char what[100];  /* path of the node, or "dmabuf:<bytes>" */
};

/* Whether this process runs under the emulator. */
ORK_HIDDEN int ork_active(void);
/* The folder that stands for a board's files, without a slash at its end. */
ORK_HIDDEN const char *ork_root(void);
/* 1 and `file` if the descriptor is one of ours; errno is kept. */
ORK_HIDDEN int ork_identify(int fd, struct ork_file *file);
/* One request with `in` bytes of `arg`, whose first `out` bytes the reply overwrites. 0 or an errno; `fd` is the
 * descriptor that came with the reply, or -1. */
ORK_HIDDEN int ork_call(const struct ork_request *request, void *arg, size_t in, size_t out, struct ork_reply *reply,
                        int *fd);

#endif

/* A bare use of the driver: buffers and submits. Every failure prints one line and ends the program with code 3. */
#ifndef NPU_H
#define NPU_H

#include <stddef.h>
#include "uapi.h"

enum { CACHED = 0x403, TASKS = 0x40b, UNCACHED = 0x401 };
enum { TO_DEVICE = 1, FROM_DEVICE = 2 };
enum { BLOCK = 5, NONBLOCK = 7 };

struct buffer {
    uint32_t handle, flags;
    uint64_t size, object, address;
    void *data;
};
struct registers { int count; struct { uint32_t offset, value; } list[1200]; };

int npu_open(const char *path);
struct buffer buffer_make(int npu, size_t size, uint32_t flags, int domain);
void buffer_sync(int npu, const struct buffer *buffer, int direction);
void buffer_free(int npu, struct buffer *buffer);
void *map(int fd, size_t size, uint64_t offset);
void fail(const char *what);

void set(struct registers *registers, uint32_t offset, uint32_t value);
void append(struct registers *registers, uint32_t offset, uint32_t value);

/* A command buffer with `count` programs, each leading to the next, and the task array that starts it. */
struct chain { struct buffer commands, tasks; int count; uint32_t enable, amount; };
struct chain chain_make(int npu, const struct registers *programs, int count, uint32_t enable, int domain);
/* 0, or the errno of the submit. */
int chain_submit(int npu, const struct chain *chain, int flags, int core, int domain, int timeout);
void chain_free(int npu, struct chain *chain);

#endif

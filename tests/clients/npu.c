#include "npu.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void fail(const char *what) {
    fprintf(stderr, "client: %s: %s\n", what, strerror(errno));
    exit(3);
}

int npu_open(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) fail(path);
    return fd;
}

void *map(int fd, size_t size, uint64_t offset) {
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (at == MAP_FAILED) fail("mmap");
    return at;
}

struct buffer buffer_make(int npu, size_t size, uint32_t flags, int domain) {
    struct rknpu_mem_create create = {.flags = flags, .size = size, .domain = domain};
    if (ioctl(npu, RKNPU_MEM_CREATE, &create) < 0) fail("MEM_CREATE");
    struct rknpu_mem_map mapping = {.handle = create.handle};
    if (ioctl(npu, RKNPU_MEM_MAP, &mapping) < 0) fail("MEM_MAP");
    return (struct buffer){create.handle, flags, create.size, create.obj_addr, create.dma_addr,
                           map(npu, create.size, mapping.offset)};
}

void buffer_sync(int npu, const struct buffer *buffer, int direction) {
    struct rknpu_mem_sync sync = {.flags = direction, .obj_addr = buffer->object, .size = buffer->size};
    if (buffer->flags & 2 && ioctl(npu, RKNPU_MEM_SYNC, &sync) < 0) fail("MEM_SYNC");
}

void buffer_free(int npu, struct buffer *buffer) {
    struct rknpu_mem_destroy destroy = {.handle = buffer->handle};
    munmap(buffer->data, buffer->size);
    if (ioctl(npu, RKNPU_MEM_DESTROY, &destroy) < 0) fail("MEM_DESTROY");
}

void set(struct registers *registers, uint32_t offset, uint32_t value) {
    for (int i = 0; i < registers->count; i++)
        if (registers->list[i].offset == offset) {
            registers->list[i].value = value;
            return;
        }
    append(registers, offset, value);
}

void append(struct registers *registers, uint32_t offset, uint32_t value) {
    registers->list[registers->count].offset = offset;
    registers->list[registers->count++].value = value;
}

static uint64_t word(uint32_t offset, uint32_t value) {
    static const uint16_t target[] = {0x0101, 0x0201, 0, 0x0801, 0x1001, 0x2001, 0x4001, 0x8001};
    return (uint64_t)target[offset >> 12] << 48 | (uint64_t)value << 16 | offset;
}

struct chain chain_make(int npu, const struct registers *programs, int count, uint32_t enable, int domain) {
    int longest = 0;
    for (int p = 0; p < count; p++) longest = programs[p].count > longest ? programs[p].count : longest;
    size_t pitch = ((longest + 4) * 8 + 63) / 64 * 64;
    struct chain chain = {.count = count, .enable = enable, .amount = programs[0].count};
    chain.commands = buffer_make(npu, count * pitch, CACHED, domain);
    chain.tasks = buffer_make(npu, count * sizeof(struct rknpu_task), TASKS, domain);
    struct rknpu_task *task = chain.tasks.data;
    for (int p = 0; p < count; p++) {
        uint64_t *at = (uint64_t *)((char *)chain.commands.data + p * pitch);
        for (int i = 0; i < programs[p].count; i++) *at++ = word(programs[p].list[i].offset, programs[p].list[i].value);
        int last = p + 1 == count;
        *at++ = last ? 0 : word(0x10, (uint32_t)chain.commands.address + (uint32_t)((p + 1) * pitch));
        *at++ = word(0x14, last ? 0 : (programs[p + 1].count + 3) / 2);
        *at++ = (uint64_t)0x0041 << 48;
        *at++ = (uint64_t)0x0081 << 48 | enable << 16 | 0x0008;
        task[p] = (struct rknpu_task){.enable_mask = enable, .int_mask = enable == 0x60 ? 0xc00 : 0x300,
                                      .int_clear = 0x1ffff, .regcfg_amount = programs[p].count,
                                      .regcmd_addr = chain.commands.address + p * pitch};
    }
    buffer_sync(npu, &chain.commands, TO_DEVICE);
    buffer_sync(npu, &chain.tasks, TO_DEVICE);
    return chain;
}

int chain_submit(int npu, const struct chain *chain, int flags, int core, int domain, int timeout) {
    struct rknpu_submit submit = {.flags = flags, .timeout = timeout, .task_number = chain->count, .domain = domain,
                                  .task_obj_addr = chain->tasks.object, .core_mask = 1u << core, .fence_fd = -1};
    for (int i = 0; i < 3; i++) submit.subcore[i] = (struct rknpu_subcore){0, chain->count};
    return ioctl(npu, RKNPU_SUBMIT, &submit) < 0 ? errno : 0;
}

void chain_free(int npu, struct chain *chain) {
    buffer_free(npu, &chain->commands);
    buffer_free(npu, &chain->tasks);
}

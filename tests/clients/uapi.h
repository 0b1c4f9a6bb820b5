/* The kernel interface of Rockchip's NPU driver, 0.9.8, as a user program declares it. */
#ifndef UAPI_H
#define UAPI_H

#include <stdint.h>
#include <sys/ioctl.h>

struct rknpu_action { uint32_t flags, value; };
struct rknpu_mem_create {
    uint32_t handle, flags;
    uint64_t size, obj_addr, dma_addr, sram_size;
    int32_t domain;
    uint32_t core_mask;
};
struct rknpu_mem_map { uint32_t handle, reserved; uint64_t offset; };
struct rknpu_mem_destroy { uint32_t handle, reserved; uint64_t obj_addr; };
struct rknpu_mem_sync { uint32_t flags, reserved; uint64_t obj_addr, offset, size; };
struct rknpu_task {
    uint32_t flags, op_idx, enable_mask, int_mask, int_clear, int_status, regcfg_amount, regcfg_offset;
    uint64_t regcmd_addr;
} __attribute__((packed));
struct rknpu_subcore { uint32_t start, number; };
struct rknpu_submit {
    uint32_t flags, timeout, task_start, task_number, task_counter;
    int32_t priority;
    uint64_t task_obj_addr;
    uint32_t domain, reserved;
    uint64_t task_base_addr;
    int64_t hw_elapse_time;
    uint32_t core_mask;
    int32_t fence_fd;
    struct rknpu_subcore subcore[5];
};

#define RKNPU_ACTION _IOWR('d', 0x40, struct rknpu_action)
#define RKNPU_SUBMIT _IOWR('d', 0x41, struct rknpu_submit)
#define RKNPU_MEM_CREATE _IOWR('d', 0x42, struct rknpu_mem_create)
#define RKNPU_MEM_MAP _IOWR('d', 0x43, struct rknpu_mem_map)
#define RKNPU_MEM_DESTROY _IOWR('d', 0x44, struct rknpu_mem_destroy)
#define RKNPU_MEM_SYNC _IOWR('d', 0x45, struct rknpu_mem_sync)

struct drm_version {
    int major, minor, patch;
    uint64_t name_len;
    char *name;
    uint64_t date_len;
    char *date;
    uint64_t desc_len;
    char *desc;
};
struct drm_gem_close { uint32_t handle, pad; };
struct drm_prime { uint32_t handle, flags; int32_t fd; };
struct dma_heap { uint64_t len; uint32_t fd, fd_flags; uint64_t heap_flags; };
struct dma_buf_sync { uint64_t flags; };

#define DRM_VERSION _IOWR('d', 0x00, struct drm_version)
#define DRM_GEM_CLOSE _IOW('d', 0x09, struct drm_gem_close)
#define DRM_HANDLE_TO_FD _IOWR('d', 0x2d, struct drm_prime)
#define DRM_FD_TO_HANDLE _IOWR('d', 0x2e, struct drm_prime)
#define DMA_HEAP_ALLOC _IOWR('H', 0x00, struct dma_heap)
#define DMA_BUF_SYNC _IOW('b', 0x00, struct dma_buf_sync)

#endif

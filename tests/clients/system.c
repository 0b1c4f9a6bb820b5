/* Memory, submits and processes: what programs do with the driver around their matmuls. */
#define _GNU_SOURCE
#include "tests.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int expect(int good, const char *what) {
    if (!good) fprintf(stderr, "client: %s (%s)\n", what, strerror(errno));
    return !good;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int test_version(void) {
    char name[16] = "", date[16] = "";
    int npu = npu_open(node);
    struct drm_version version = {.name_len = sizeof name, .name = name, .date_len = sizeof date, .date = date};
    struct stat st;
    if (ioctl(npu, DRM_VERSION, &version) < 0) fail("DRM_VERSION");
    if (expect(!strcmp(name, "rknpu") && version.name_len == 5, "the driver's name")) return 1;
    if (expect(version.major == 0 && version.minor == 9 && version.patch == 8, "the driver's version")) return 1;
    if (fstat(npu, &st) < 0) fail("fstat");
    if (expect(S_ISCHR(st.st_mode) && major(st.st_rdev) == 226, "a DRM character device")) return 1;
    struct rknpu_action action = {.flags = 1};
    if (ioctl(npu, RKNPU_ACTION, &action) < 0) fail("ACTION");
    return expect(action.value == 908, "the driver's version number");
}

/* One matmul whose buffers the test keeps. */
enum { M = 8, K = 64, N = 64 };
struct work { struct buffer a, b, c; struct chain chain; };

static void fill(int8_t *a, int8_t *b) {
    for (int m = 0; a && m < M; m++)
        for (int k = 0; k < K; k++) a[m * K + k] = value(m, k, -128, 127);
    for (int k = 0; b && k < K; k++)
        for (int n = 0; n < N; n++) b[kernel_at(k, n, K, 32)] = value(k + 1000, n, -128, 127);
}

static struct work work_make(int npu, const struct buffer *weights) {
    struct work work = {.a = buffer_make(npu, M * K, CACHED, 0), .c = buffer_make(npu, M * N * 4, UNCACHED, 0)};
    work.b = weights ? *weights : buffer_make(npu, K * N, CACHED, 0);
    fill(work.a.data, weights ? NULL : work.b.data);
    buffer_sync(npu, &work.a, TO_DEVICE);
    if (!weights) buffer_sync(npu, &work.b, TO_DEVICE);
    struct registers r = matmul(INT8, M, K, N);
    operands(&r, &work.a, 0, &work.b, &work.c, 0);
    maybe_break(&r);
    work.chain = chain_make(npu, &r, 1, 0xd, 0);
    return work;
}

static int work_check(const struct work *work) {
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            if (differs("matmul", m, n, ((int32_t *)work->c.data)[m * N + n], product(m, n, K, -128, 127))) return 1;
    return 0;
}

static void work_run(int npu, struct work *work, int core) {
    memset(work->c.data, 0x55, M * N * 4);
    if ((errno = chain_submit(npu, &work->chain, BLOCK, core, 0, 6000))) fail("SUBMIT");
}

int test_nonblock(void) {
    int npu = npu_open(node);
    struct work work = work_make(npu, NULL);
    volatile int32_t *bell = (int32_t *)work.c.data + M * N - 1;
    for (int round = 0; round < 5; round++) {
        *bell = 0x7fffffff;
        if ((errno = chain_submit(npu, &work.chain, NONBLOCK, round % 3, 0, 6000))) fail("SUBMIT");
        for (double end = seconds() + 3; *bell == 0x7fffffff && seconds() < end;) usleep(50);
        if (expect(*bell != 0x7fffffff, "no result after 3 s")) return 1;
        usleep(2000);  /* the bell is the last word, but not the last store */
        if (work_check(&work)) return 1;
    }
    return 0;
}

int test_domains(void) {
    int npu = npu_open(node), wrong = 0;
    for (int i = 0; i < 4 && !wrong; i++) wrong = any_matmul(npu, INT8, 4, 64, 64, CACHED, 0, i & 1 ? 5 : 0);
    return wrong;
}

static struct buffer import_make(int npu, size_t size, int *fd) {
    int heap = open("/dev/dma_heap/system", O_RDWR | O_CLOEXEC);
    if (heap < 0) fail("dma_heap");
    struct dma_heap alloc = {.len = size, .fd_flags = O_RDWR | O_CLOEXEC};
    if (ioctl(heap, DMA_HEAP_ALLOC, &alloc) < 0) fail("DMA_HEAP_ALLOC");
    close(heap);
    struct drm_prime prime = {.fd = alloc.fd};
    if (ioctl(npu, DRM_FD_TO_HANDLE, &prime) < 0) fail("FD_TO_HANDLE");
    struct rknpu_mem_create create = {.handle = prime.handle};
    if (ioctl(npu, RKNPU_MEM_CREATE, &create) < 0) fail("MEM_CREATE of an import");
    *fd = alloc.fd;
    return (struct buffer){prime.handle, 0, create.size, create.obj_addr, create.dma_addr, map(alloc.fd, size, 0)};
}

int test_import(void) {
    int npu = npu_open(node), fd;
    struct rknpu_action enter = {.flags = 25, .value = 0};  /* an import goes into whatever domain is attached */
    if (ioctl(npu, RKNPU_ACTION, &enter) < 0) fail("ACTION");
    struct buffer weights = import_make(npu, K * N, &fd);
    struct dma_buf_sync begin = {2}, end = {2 | 4};
    if (expect(lseek(fd, 0, SEEK_END) == 4096, "the size of a dma-buf")) return 1;
    if (ioctl(fd, DMA_BUF_SYNC, &begin) < 0) fail("DMA_BUF_SYNC");
    fill(NULL, weights.data);
    if (ioctl(fd, DMA_BUF_SYNC, &end) < 0) fail("DMA_BUF_SYNC");
    struct work work = work_make(npu, &weights);
    close(fd);
    work_run(npu, &work, 0);
    return work_check(&work);
}

int test_export(void) {
    int npu = npu_open(node), other = npu_open(node);
    struct work work = work_make(npu, NULL);
    work_run(npu, &work, 0);
    struct drm_prime out = {.handle = work.c.handle, .flags = O_CLOEXEC | O_RDWR}, back = {0};
    if (ioctl(npu, DRM_HANDLE_TO_FD, &out) < 0) fail("HANDLE_TO_FD");
    if (expect(fcntl(out.fd, F_GETFD) == FD_CLOEXEC, "close-on-exec of a dma-buf")) return 1;
    int32_t *seen = map(out.fd, M * N * 4, 0);
    if (expect(!memcmp(seen, work.c.data, M * N * 4), "the same bytes through a dma-buf")) return 1;
    back.fd = out.fd;
    if (ioctl(npu, DRM_FD_TO_HANDLE, &back) < 0) fail("FD_TO_HANDLE");
    if (expect(back.handle == work.c.handle, "an object that comes back as itself")) return 1;
    if (ioctl(other, DRM_FD_TO_HANDLE, &back) < 0) fail("FD_TO_HANDLE on another file");
    return work_check(&work);
}

static int ended(pid_t pid) {
    int status;
    if (waitpid(pid, &status, 0) < 0) fail("waitpid");
    return !WIFEXITED(status) || WEXITSTATUS(status);
}

int test_processes(void) {
    pid_t pids[3];
    for (int i = 0; i < 3; i++)
        if (!(pids[i] = fork())) {
            int npu = npu_open(node), wrong = 0;
            for (int round = 0; round < 4 && !wrong; round++)
                wrong = any_matmul(npu, INT8, 8 + i, 64, 64, CACHED, i, 0);
            _exit(wrong);
        }
    return ended(pids[0]) | ended(pids[1]) | ended(pids[2]);
}

/* A child uses what its parent opened, made and mapped; the parent sees the result. */
int test_fork(void) {
    int npu = npu_open(node);
    struct work work = work_make(npu, NULL);
    work_run(npu, &work, 0);
    pid_t pid = fork();
    if (!pid) {
        work_run(npu, &work, 1);
        if (work_check(&work)) _exit(1);
        memset(work.c.data, 0, M * N * 4);
        if ((errno = chain_submit(npu, &work.chain, BLOCK, 2, 0, 6000))) fail("SUBMIT");
        close(npu);
        _exit(0);
    }
    if (ended(pid) || work_check(&work)) return 1;
    work_run(npu, &work, 0);
    return work_check(&work);
}

static int shared_npu;
static void *worker(void *core) {
    long wrong = 0;
    for (int round = 0; round < 6 && !wrong; round++)
        wrong = any_matmul(shared_npu, round & 1 ? INT8 : FP16, 4 + round, 64, 64, CACHED, (int)(long)core % 3, 0);
    return (void *)wrong;
}

int test_threads(void) {
    pthread_t threads[6];
    void *wrong, *any = NULL;
    shared_npu = npu_open(node);
    for (long i = 0; i < 6; i++)
        if ((errno = pthread_create(&threads[i], NULL, worker, (void *)i))) fail("pthread_create");
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], &wrong);
        if (wrong) any = wrong;
    }
    return any != NULL;
}

/* An open descriptor survives exec, and a program started with an empty environment is still on the chip. */
int test_exec(void) {
    const char *inherited = getenv("CLIENT_FD");
    if (inherited) return any_matmul(atoi(inherited), INT8, 4, 64, 64, CACHED, 0, 0);
    int npu = dup(npu_open(node));
    char number[32];
    snprintf(number, sizeof number, "CLIENT_FD=%d", npu);
    char *argv[] = {"client", "exec", NULL}, *env[] = {number, NULL};
    pid_t pid = fork();
    if (!pid) {
        execve("/proc/self/exe", argv, env);
        fail("execve");
    }
    return ended(pid);
}

/* A buffer lives while it is mapped, though its handle is gone; then its address space is free again. */
int test_lifetime(void) {
    int npu = npu_open(node);
    for (int round = 0; round < 2; round++) {
        struct work work = work_make(npu, NULL);
        struct rknpu_mem_destroy destroy = {.handle = work.b.handle};
        if (ioctl(npu, RKNPU_MEM_DESTROY, &destroy) < 0) fail("MEM_DESTROY");
        work_run(npu, &work, 0);
        if (work_check(&work)) return 1;
        munmap(work.b.data, work.b.size);
        buffer_free(npu, &work.a);
        buffer_free(npu, &work.c);
        chain_free(npu, &work.chain);
        struct rknpu_mem_create whole[62];
        for (int i = 0; i < 62; i++) {  /* all of the window, if nothing else is in it */
            whole[i] = (struct rknpu_mem_create){.flags = CACHED, .size = 64 << 20};
            if (ioctl(npu, RKNPU_MEM_CREATE, &whole[i]) < 0) fail("MEM_CREATE of the whole window");
        }
        for (int i = 0; i < 62; i++) {
            struct drm_gem_close gem = {.handle = whole[i].handle};
            if (ioctl(npu, DRM_GEM_CLOSE, &gem) < 0) fail("GEM_CLOSE");
        }
    }
    return 0;
}

/* Closing the last descriptor frees its buffers before the next open returns. */
int test_reopen(void) {
    for (int round = 0; round < 3; round++) {
        int npu = npu_open(node);
        for (int i = 0; i < 62; i++) {
            struct rknpu_mem_create create = {.flags = CACHED, .size = 64 << 20};
            if (ioctl(npu, RKNPU_MEM_CREATE, &create) < 0) fail("MEM_CREATE");
        }
        close(npu);
    }
    return 0;
}

/* More buffers than a process usually may have open files. */
int test_many(void) {
    enum { COUNT = 1500 };
    static struct rknpu_mem_create made[COUNT];
    int npu = npu_open(node);
    for (int i = 0; i < COUNT; i++) {
        made[i] = (struct rknpu_mem_create){.flags = CACHED, .size = 4096};
        if (ioctl(npu, RKNPU_MEM_CREATE, &made[i]) < 0) fail("MEM_CREATE");
    }
    return any_matmul(npu, INT8, 2, 32, 32, CACHED, 0, 0);
}

/* A process that is killed leaves nothing behind. */
int test_killed(void) {
    for (int round = 0; round < 2; round++) {
        pid_t pid = fork();
        if (!pid) {
            int npu = npu_open(node);
            for (int i = 0; i < 62; i++) buffer_make(npu, 64 << 20, CACHED, 0);
            kill(getpid(), SIGKILL);
        }
        int status;
        if (waitpid(pid, &status, 0) < 0) fail("waitpid");
        if (expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "a child that got what it asked for")) return 1;
    }
    return 0;
}

static int gives(int result, int error, const char *what) { return expect(result < 0 && errno == error, what); }

int test_errors(void) {
    int npu = npu_open(node), none = open("/dev/dri/card9", O_RDWR);
    struct rknpu_mem_map no_handle = {.handle = 77};
    struct rknpu_mem_sync no_object = {.flags = 1, .size = 64};
    struct rknpu_mem_create create = {.flags = UNCACHED, .size = 100}, empty = {.flags = CACHED};
    struct rknpu_mem_create high = {.size = 1, .domain = 16};
    struct drm_prime no_file = {.fd = 0};
    int wrong = gives(none, ENOENT, "a node that is not there");
    wrong |= gives(ioctl(npu, RKNPU_MEM_MAP, &no_handle), ENOENT, "a handle that is not there");
    wrong |= gives(ioctl(npu, RKNPU_MEM_SYNC, &no_object), EINVAL, "an object that is not there");
    wrong |= gives(ioctl(npu, RKNPU_MEM_CREATE, &empty), EINVAL, "an empty buffer");
    wrong |= gives(ioctl(npu, RKNPU_MEM_CREATE, &high), EINVAL, "a domain that is not there");
    wrong |= gives(ioctl(npu, RKNPU_MEM_CREATE, NULL), EFAULT, "no argument");
    wrong |= gives(ioctl(npu, RKNPU_SUBMIT, (void *)16), EFAULT, "an argument that is nowhere");
    wrong |= gives(ioctl(npu, _IOWR('d', 0x5f, struct rknpu_action), &no_handle), EINVAL, "a call that is not there");
    wrong |= gives(ioctl(npu, DRM_FD_TO_HANDLE, &no_file), EINVAL, "an import of no dma-buf");
    no_file.fd = 999;
    wrong |= gives(ioctl(npu, DRM_FD_TO_HANDLE, &no_file), EBADF, "an import of no descriptor");
    wrong |= gives(ioctl(999, RKNPU_MEM_CREATE, &create), EBADF, "a descriptor that is not there");
    wrong |= gives(ioctl(0, RKNPU_MEM_CREATE, &create), ENOTTY, "a descriptor of something else");
    if (ioctl(npu, RKNPU_MEM_CREATE, &create) < 0) fail("MEM_CREATE");
    wrong |= expect(create.size == 4096, "whole pages");
    struct rknpu_mem_map mapping = {.handle = create.handle};
    if (ioctl(npu, RKNPU_MEM_MAP, &mapping) < 0) fail("MEM_MAP");
    void *at = mmap(NULL, 8192, PROT_READ, MAP_SHARED, npu, mapping.offset);
    wrong |= expect(at == MAP_FAILED && errno == EINVAL, "a mapping longer than the object");
    at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, npu, 4096);
    wrong |= expect(at == MAP_FAILED && errno == EINVAL, "a mapping of no object");
    close(npu);
    wrong |= gives(ioctl(npu, RKNPU_MEM_MAP, &mapping), EBADF, "a closed descriptor");
    return wrong;
}

/* Daemons close every number that they do not know. */
int test_closefrom(void) {
    int npu = npu_open(node);
    if (any_matmul(npu, INT8, 2, 32, 32, CACHED, 0, 0)) return 1;
    for (int fd = npu + 1; fd < 1024; fd++) close(fd);
    return any_matmul(npu, INT8, 2, 32, 32, CACHED, 0, 0);
}

/* A descriptor goes to another process over a socket. */
int test_passed(void) {
    int pair[2], npu = npu_open(node);
    union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    char byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0) fail("socketpair");
    pid_t pid = fork();
    if (!pid) {
        close(npu);
        if (recvmsg(pair[1], &message, 0) < 0) fail("recvmsg");
        memcpy(&npu, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof npu);
        _exit(any_matmul(npu, INT8, 3, 64, 64, CACHED, 0, 0));
    }
    control.head.cmsg_level = SOL_SOCKET;
    control.head.cmsg_type = SCM_RIGHTS;
    control.head.cmsg_len = CMSG_LEN(sizeof npu);
    memcpy(CMSG_DATA(&control.head), &npu, sizeof npu);
    if (sendmsg(pair[0], &message, 0) < 0) fail("sendmsg");
    close(npu);
    return ended(pid);
}

/* Structures of older headers are shorter. */
int test_old(void) {
    struct {
        uint32_t handle, flags;
        uint64_t size, obj_addr, dma_addr, sram_size, behind;
    } create = {.flags = CACHED, .size = 5000, .behind = 0x1234};
    int npu = npu_open(node);
    if (ioctl(npu, _IOWR('d', 0x42, char[40]), &create) < 0) fail("MEM_CREATE of 40 bytes");
    return expect(create.size == 8192 && create.dma_addr && create.behind == 0x1234, "a buffer, and no byte more");
}

/* --- measured, for the benchmark --- */

int test_speed(void) {
    enum { m = 512, k = 2048, n = 2048, ROUNDS = 6 };
    int npu = npu_open(node);
    struct buffer a = buffer_make(npu, m * k, CACHED, 0), b = buffer_make(npu, k * n, CACHED, 0);
    struct buffer c = buffer_make(npu, m * n * 4, CACHED, 0);
    memset(a.data, 3, m * k);
    memset(b.data, 5, k * n);
    struct registers tiles[8];
    int rows = 128, count = 0;  /* 8 banks of rows, 4 of weights */
    for (int row = 0; row < m; row += rows, count++) {
        int these = row + rows < m ? rows : m - row;
        tiles[count] = matmul(INT8, these, k, n);
        operands(&tiles[count], &a, (size_t)row * k, &b, &c, (size_t)row * n * 4);
    }
    struct chain chain = chain_make(npu, tiles, count, 0xd, 0);
    buffer_sync(npu, &a, TO_DEVICE);
    buffer_sync(npu, &b, TO_DEVICE);
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        double from = seconds();
        buffer_sync(npu, &a, TO_DEVICE);
        if ((errno = chain_submit(npu, &chain, BLOCK, 0, 0, 6000))) fail("SUBMIT");
        buffer_sync(npu, &c, FROM_DEVICE);
        double took = seconds() - from;
        if (took < best) best = took;
    }
    printf("%.6f seconds for a matmul\n", best);
    for (int i = 0; i < m * n; i += 4097)
        if (differs("matmul", i / n, i % n, ((int32_t *)c.data)[i], 15 * k)) return 1;
    return 0;
}

int test_calls(void) {
    enum { CALLS = 2000 };
    int npu = npu_open(node);
    struct rknpu_action action = {.flags = 1};
    double from = seconds();
    for (int i = 0; i < CALLS; i++)
        if (ioctl(npu, RKNPU_ACTION, &action) < 0) fail("ACTION");
    printf("%.9f seconds a call\n", (seconds() - from) / CALLS);
    return 0;
}

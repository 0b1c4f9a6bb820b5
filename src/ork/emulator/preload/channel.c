/* Connections to the emulator: one a thread, made when it first asks something, and anew in a forked child. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    COPIES = 4096,           /* names and dates of drivers */
    OUT_OF_THE_WAY = 500,    /* connections take numbers from here on: programs count on low ones, or close them all */
};

static char server[80], root[200];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t at_thread_end;
static __thread int channel = -1;
static __thread pid_t owner;  /* a forked child has the variable, not the connection */

static void forget(void *unused) {
    (void)unused;
    if (channel >= 0 && owner == getpid()) close(channel);
    channel = -1;
}

static void start(void) {
    const char *name = getenv(ORK_SERVER), *folder = getenv(ORK_ROOT);
    if (name && folder && strlen(name) < sizeof server && strlen(folder) < sizeof root) {
        strcpy(root, folder);
        strcpy(server, name);
    }
    pthread_key_create(&at_thread_end, forget);
}

__attribute__((constructor)) static void before_main(void) { pthread_once(&once, start); }

int ork_active(void) {
    pthread_once(&once, start);
    return server[0] != 0;
}

const char *ork_root(void) { return root; }

/* The rest of the name behind the server's, if the address is one of ours. */
static const char *ours(struct sockaddr_un *address, socklen_t length) {
    size_t known = strlen(server), at = offsetof(struct sockaddr_un, sun_path) + 1;
    if (address->sun_family != AF_UNIX || length < at + known || length >= sizeof *address || address->sun_path[0])
        return NULL;
    ((char *)address)[length] = 0;
    return strncmp(address->sun_path + 1, server, known) ? NULL : address->sun_path + 1 + known;
}

int ork_identify(int fd, struct ork_file *file) {
    struct sockaddr_un address;
    socklen_t length = sizeof address;
    int before = errno;
    if (!ork_active() || getsockname(fd, (struct sockaddr *)&address, &length) < 0) {
        errno = before;
        return 0;
    }
    const char *rest = ours(&address, length);
    return rest && sscanf(rest, "/%u/%99s", &file->id, file->what) == 2;
}

static int connected(void) {
    struct sockaddr_un address;
    socklen_t length = sizeof address;
    if (channel >= 0 && owner == getpid()) {
        /* A program may have closed every number it did not know, and even have used this one again. */
        if (!getpeername(channel, (struct sockaddr *)&address, &length) && ours(&address, length)) return channel;
    } else if (channel >= 0) {
        close(channel);  /* the parent's */
    }
    channel = -1;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path + 1, server);
    length = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(server);
    int low = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (low < 0) return -1;
    int fd = fcntl(low, F_DUPFD_CLOEXEC, OUT_OF_THE_WAY);
    if (fd < 0) fd = low; else close(low);
    if (connect(fd, (struct sockaddr *)&address, length) < 0) {
        close(fd);
        return -1;
    }
    owner = getpid();
    pthread_setspecific(at_thread_end, &channel);
    return channel = fd;
}

static void put_copies(const char *from, const char *end, uint32_t count) {
    struct ork_copy copy;
    for (; count && (size_t)(end - from) >= sizeof copy; count--) {
        memcpy(&copy, from, sizeof copy);
        from += sizeof copy;
        if (copy.bytes > (size_t)(end - from)) return;
        memcpy((void *)(uintptr_t)copy.address, from, copy.bytes);
        from += copy.bytes;
    }
}

static int transact(const struct ork_request *request, void *arg, size_t in, size_t out, struct ork_reply *reply,
                    int *received) {
    char copies[COPIES];
    union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int))]; } control;
    int fd = connected();
    if (fd < 0) return errno == EMFILE || errno == ENFILE ? errno : ENODEV;

    struct iovec to[2] = {{(void *)request, sizeof *request}, {arg, in}};
    struct msghdr sent = {.msg_iov = to, .msg_iovlen = in ? 2 : 1};
    while (sendmsg(fd, &sent, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) return errno == EFAULT ? EFAULT : ENODEV;

    /* The kernel reads and writes the argument, so that a bad pointer is EFAULT here as it is on a board. */
    struct iovec from[3] = {{reply, sizeof *reply}, {arg, out}, {copies, sizeof copies}};
    struct msghdr got = {.msg_iov = from, .msg_iovlen = 3, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t bytes;
    while ((bytes = recvmsg(fd, &got, MSG_CMSG_CLOEXEC)) < 0)
        if (errno != EINTR) return errno == EFAULT ? EFAULT : ENODEV;
    if ((size_t)bytes < sizeof *reply) return ENODEV;

    struct cmsghdr *header = CMSG_FIRSTHDR(&got);
    if (header && header->cmsg_type == SCM_RIGHTS) memcpy(received, CMSG_DATA(header), sizeof *received);
    if (reply->error) return reply->error;
    if (*received < 0 && got.msg_flags & MSG_CTRUNC) return EMFILE;
    size_t fixed = sizeof *reply + from[1].iov_len;
    if ((size_t)bytes > fixed) put_copies(copies, copies + (bytes - fixed), reply->copies);
    if (*received >= 0 && !reply->close_on_exec) fcntl(*received, F_SETFD, 0);
    if (*received >= 0 && reply->fd_at >= 0 && reply->fd_at + sizeof *received <= out)
        memcpy((char *)arg + reply->fd_at, received, sizeof *received);
    return 0;
}

int ork_call(const struct ork_request *request, void *arg, size_t in, size_t out, struct ork_reply *reply, int *fd) {
    /* As on a board, a signal does not cut a call short; nor may its handler use the connection in between. */
    sigset_t all, before;
    int keep = errno;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *fd = -1;
    int error = transact(request, arg, in, out, reply, fd);
    if (error && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = keep;
    return error;
}

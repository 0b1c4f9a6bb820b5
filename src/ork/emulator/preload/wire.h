/* The messages between a program under `ork emu exec` and the emulator. `ork/emulator/wire.py` is the same in Python.
 *
 * A thread has its own connection (SOCK_SEQPACKET, one request or reply a message). What a program holds as the
 * descriptor of a node or a dma-buf is another socket, on which nothing is ever sent: it is a real descriptor, so
 * dup, fork, exec, SCM_RIGHTS and close need no help, and the emulator sees its last close as a hang-up. Its bound
 * (abstract) name says what it is: "<server>/<file>/<what>", <what> being the node's path, or "dmabuf:<bytes>".
 */
#ifndef ORK_WIRE_H
#define ORK_WIRE_H

#include <stdint.h>

#define ORK_SERVER "ORK_EMU"      /* environment: abstract name of the emulator's socket */
#define ORK_ROOT "ORK_EMU_ROOT"   /* environment: folder whose files stand for those of a board */

enum { ORK_OPEN = 1, ORK_IOCTL = 2, ORK_MMAP = 3 };

struct ork_request {  /* then the path, or the argument's bytes */
    uint32_t op, file;
    uint64_t value;   /* request number, or length of a mapping */
    uint64_t offset;  /* of a mapping */
};

struct ork_reply {    /* then what the argument becomes, if it is read back, and the copies; perhaps a descriptor */
    int32_t error;    /* errno, 0: done */
    int32_t fd_at;    /* where in the argument the descriptor's number belongs, or -1 */
    uint32_t close_on_exec;
    uint32_t copies;
    uint64_t offset;  /* of a mapping, in the descriptor */
};

struct ork_copy {     /* then `bytes` bytes for `address`, a pointer that the argument held */
    uint64_t address;
    uint64_t bytes;
};

#endif

"""The messages between the preload library and the server, as `preload/wire.h` has them."""

from __future__ import annotations

import struct

SERVER = "ORK_EMU"  # environment of a program: abstract name of the server's socket
ROOT = "ORK_EMU_ROOT"  # and the folder whose files stand for a board's

OPEN, IOCTL, MMAP = 1, 2, 3
REQUEST = struct.Struct("<IIQQ")  # op, file, request number or length, offset; then a path or an argument
REPLY = struct.Struct("<iiIIQ")  # errno, where a descriptor's number goes or -1, its O_CLOEXEC, copies, offset
COPY = struct.Struct("<QQ")  # address, bytes; then they
LONGEST = REQUEST.size + (1 << 14)  # an ioctl's argument has 14 bits of size

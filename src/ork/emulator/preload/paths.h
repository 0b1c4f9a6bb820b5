/* Paths of a board: which file stands for one, and which of them are nodes. */
#ifndef ORK_PATHS_H
#define ORK_PATHS_H

#include <limits.h>
#include "channel.h"

/* `path` as the system is to get it: itself, or, for a board's file, `room` with the file that stands for it. */
ORK_HIDDEN const char *ork_path(int dirfd, const char *path, char room[PATH_MAX]);
/* The node that a path from `ork_path` stands for ("/dev/dri/card1"), or NULL. */
ORK_HIDDEN const char *ork_node(const char *path);
/* Take the folder's name off the front of a path that the system gave. */
ORK_HIDDEN void ork_unroot(char *path);

#endif

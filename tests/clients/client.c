/* A program for Rockchip's NPU as somebody might have written it, who knows its driver and nothing of an emulator.
 *
 * client TEST [NODE] [--break OFFSET=VALUE]: runs one test, prints "ok TEST" and ends with 0 if the chip's results are
 * what the CPU computes; else 1 (wrong result), 2 (usage) or 3 (a call failed). --break gives one register of every
 * program another value.
 */
#include "tests.h"

#include <stdio.h>
#include <string.h>

#define ENTRY(name) {#name, test_##name},
static const struct { const char *name; int (*run)(void); } LIST[] = {TESTS(ENTRY)};

int main(int argc, char **argv) {
    const char *test = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--break") && i + 1 < argc) {
            if (sscanf(argv[++i], "%i=%i", (int *)&broken_at, (int *)&broken_value) != 2) return 2;
        } else if (argv[i][0] == '/') {
            node = argv[i];
        } else {
            test = argv[i];
        }
    }
    for (unsigned i = 0; test && i < sizeof LIST / sizeof *LIST; i++)
        if (!strcmp(test, LIST[i].name)) {
            int wrong = LIST[i].run();
            if (!wrong) printf("ok %s\n", test);
            return wrong;
        }
    fprintf(stderr, "usage: client TEST [NODE] [--break OFFSET=VALUE]\n");
    return 2;
}

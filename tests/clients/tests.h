/* The tests of the client, and what they share. A test gives 0 if the results are right, else 1. */
#ifndef TESTS_H
#define TESTS_H

#include "programs.h"

extern const char *node;                    /* the device to open */
extern uint32_t broken_at, broken_value;    /* a register that every program gets wrong, or 0 */

void maybe_break(struct registers *registers);
/* Repeatable numbers: the operands of a matmul are value(i, k) and value(k + 1000, j). */
int value(int i, int j, int low, int high);
int product(int i, int j, int K, int low, int high);
size_t kernel_at(int k, int n, int K, int group);
int differs(const char *what, int i, int j, double got, double want);
int any_matmul(int npu, enum kind kind, int M, int K, int N, uint32_t flags, int core, int domain);

#define TESTS(X)                                                                                                  \
    X(int8) X(fp16) X(int4) X(uncached) X(conv) X(add) X(pool) X(silu)                                            \
    X(version) X(nonblock) X(domains) X(import) X(export) X(processes) X(fork) X(threads) X(exec)                 \
    X(lifetime) X(reopen) X(errors) X(closefrom) X(passed) X(old) X(many) X(killed) X(speed) X(calls)
#define DECLARE(name) int test_##name(void);
TESTS(DECLARE)

#endif

// Which instruction set this process uses: the best that the processor runs, unless ORK_ISA or choose_kernels says otherwise.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include "kernels.h"
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ork {

namespace isa_portable { extern const Kernels table; }
#if defined(__x86_64__)
namespace isa_avx2 { extern const Kernels table; }
namespace isa_avxvnni { extern const Kernels table; }
namespace isa_avx512 { extern const Kernels table; }
#elif defined(__aarch64__)
namespace isa_neon { extern const Kernels table; }
namespace isa_neondot { extern const Kernels table; }
#endif

namespace {

struct Candidate { const Kernels* table; bool runnable; };

#if defined(__x86_64__)
// Bits that __builtin_cpu_supports has no name for in older compilers.
unsigned cpuid(unsigned leaf, unsigned subleaf, char reg) {
    unsigned a = leaf, b, c = subleaf, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return reg == 'a' ? a : c;
}
bool has_f16c() { return cpuid(1, 0, 'c') >> 29 & 1; }
bool has_avx_vnni() { return cpuid(7, 1, 'a') >> 4 & 1; }
#endif

// Best first.
int candidates(Candidate* out) {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    out[n++] = {&isa_avx512::table, avx512};
    out[n++] = {&isa_avxvnni::table, avx2 && has_avx_vnni()};
    out[n++] = {&isa_avx2::table, avx2};
#elif defined(__aarch64__)
    bool dot = false;
#if defined(__linux__)
    dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
    out[n++] = {&isa_neondot::table, dot};
    out[n++] = {&isa_neon::table, true};
#endif
    out[n++] = {&isa_portable::table, true};
    return n;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

bool choose_kernels(const char* name) {
    Candidate c[8];
    for (int i = 0, n = candidates(c); i < n; i++)
        if (c[i].runnable && (!std::strcmp(name, "best") || !std::strcmp(name, c[i].table->name))) {
            chosen = c[i].table;
            return true;
        }
    return false;
}

const Kernels* kernels() {
    const Kernels* k = chosen;
    if (!k) {
        const char* asked = std::getenv("ORK_ISA");
        if (!asked || !choose_kernels(asked)) choose_kernels("best");
        k = chosen;
    }
    return k;
}

int kernel_names(const char** out, int cap) {
    Candidate c[8];
    int count = 0;
    for (int i = 0, n = candidates(c); i < n && count < cap; i++)
        if (c[i].runnable) out[count++] = c[i].table->name;
    return count;
}

}  // namespace ork

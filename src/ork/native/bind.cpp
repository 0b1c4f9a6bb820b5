// The one file that knows Python. Everything it calls is plain C++ (see the headers beside it).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

// --- sources: dequantisation and string scans -------------------------------------------------
// --- end of sources ---------------------------------------------------------------------------

NB_MODULE(_core, m) {
    m.doc() = "ork's kernels";
    // --- sources bindings ---
    // --- end of sources bindings ---
}

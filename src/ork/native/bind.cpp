// The one file that knows Python. Everything it calls is plain C++ (see the headers beside it).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dequant.h"
#include "scan.h"

namespace nb = nanobind;

// --- sources: dequantisation and string scans -------------------------------------------------
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Expands blocks [first, first + out.size() / block) of `src` into `out`; every range is checked here.
void py_dequantise(uint32_t type, Bytes src, nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> out,
                   uint64_t first) {
    const ork::TensorType* t = ork::find_tensor_type(type);
    if (!t) throw nb::value_error("unknown tensor type");
    const uint64_t blocks = out.size() / t->block, held = src.size() / t->bytes;
    if (out.size() % t->block || first > held || blocks > held - first)
        throw nb::value_error("block range outside of the tensor");
    nb::gil_scoped_release unlocked;
    t->expand(src.data() + first * t->bytes, out.data(), blocks);
}

// (index of the first string outside of `src` or their count, offset reached); fills starts and lengths.
nb::tuple py_scan_strings(Bytes src, uint64_t offset,
                          nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> starts,
                          nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> lengths) {
    if (starts.size() != lengths.size()) throw nb::value_error("starts and lengths differ in size");
    uint64_t end = 0;
    const uint64_t n = ork::scan_strings(src.data(), src.size(), offset, starts.size(), starts.data(),
                                         lengths.data(), &end);
    return nb::make_tuple(n, end);
}

}  // namespace
// --- end of sources ---------------------------------------------------------------------------

NB_MODULE(_core, m) {
    m.doc() = "ork's kernels";
    // --- sources bindings ---
    nb::list types;
    for (size_t i = 0; i < ork::kTensorTypeCount; i++) {
        const ork::TensorType& t = ork::kTensorTypes[i];
        types.append(nb::make_tuple(t.id, t.name, t.block, t.bytes));
    }
    m.attr("tensor_types") = nb::tuple(types);
    m.def("dequantise", &py_dequantise, nb::arg("type"), nb::arg("src"), nb::arg("out"), nb::arg("first") = 0);
    m.def("scan_strings", &py_scan_strings, nb::arg("src"), nb::arg("offset"), nb::arg("starts"), nb::arg("lengths"));
    // --- end of sources bindings ---
}

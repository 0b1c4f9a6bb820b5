// The one file that knows Python. Everything it calls is plain C++ (see the headers beside it).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "conv.h"
#include "dequant.h"
#include "experts.h"
#include "files.h"
#include "gptq.h"
#include "npu.h"
#include "merges.h"
#include "ops.h"
#include "pool.h"
#include "scan.h"
#include "score.h"

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

// Ranges of a file into arrays, each filled whole, by all threads; whether all came.
bool py_read_parts(int fd, const std::vector<int64_t>& offsets, const std::vector<nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>& arrays) {
    if (offsets.size() != arrays.size()) throw nb::value_error("offsets and arrays differ in number");
    std::vector<ork::FilePart> parts;
    for (size_t i = 0; i < arrays.size(); i++) parts.push_back({offsets[i], (int64_t)arrays[i].size(), arrays[i].data()});
    nb::gil_scoped_release unlocked;
    return ork::read_parts(fd, parts);
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

using Offsets = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ork::Texts texts_of(const Bytes& data, const Offsets& starts, const Offsets& lengths) {
    if (starts.size() != lengths.size() || starts.size() >= 0xFFFFFFFF) throw nb::value_error("starts and lengths differ in size, or are too many");
    for (size_t i = 0; i < starts.size(); i++)
        if (starts.data()[i] > data.size() || lengths.data()[i] > data.size() - starts.data()[i]) throw nb::value_error("a text outside of its bytes");
    return {data.data(), starts.data(), lengths.data(), starts.size()};
}

const uint8_t* one_each(const Bytes& flags, const ork::Texts& texts) {
    if (flags.size() != texts.count) throw nb::value_error("one flag for each text");
    return flags.data();
}

template <class T, size_t N> nb::object numbers(std::vector<T>&& made) {   // as a numpy array of u32 that owns them
    static_assert(sizeof(T) == N * sizeof(uint32_t));
    auto* held = new std::vector<T>(std::move(made));
    nb::capsule owner(held, [](void* p) noexcept { delete (std::vector<T>*)p; });
    const size_t shape[2] = {held->size(), N};
    return nb::cast(nb::ndarray<nb::numpy, uint32_t>((void*)held->data(), N == 1 ? 1 : 2, shape, owner));
}

void bind_merges(nb::module_& m) {
    m.def("distinct_texts", [](Bytes data, Offsets starts, Offsets lengths, Bytes mergeable) {
        const ork::Texts tokens = texts_of(data, starts, lengths);
        const uint8_t* flags = one_each(mergeable, tokens);
        std::vector<uint32_t> made;
        { nb::gil_scoped_release unlocked; made = ork::distinct_texts(tokens, flags); }
        return numbers<uint32_t, 1>(std::move(made));
    });
    m.def("merges_by_score", [](Bytes data, Offsets starts, Offsets lengths, Bytes mergeable,
                                nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu> scores) {
        const ork::Texts tokens = texts_of(data, starts, lengths);
        const uint8_t* flags = one_each(mergeable, tokens);
        if (scores.size() != tokens.count) throw nb::value_error("one score for each text");
        std::vector<ork::Merge> made;
        { nb::gil_scoped_release unlocked; made = ork::merges_by_score(tokens, flags, scores.data()); }
        return numbers<ork::Merge, 3>(std::move(made));
    });
    m.def("merges_as_listed", [](Bytes data, Offsets starts, Offsets lengths, Bytes mergeable, Bytes listed, Offsets listed_starts,
                                 Offsets listed_lengths, std::optional<Offsets> cuts) {
        const ork::Texts tokens = texts_of(data, starts, lengths), lines = texts_of(listed, listed_starts, listed_lengths);
        const uint8_t* flags = one_each(mergeable, tokens);
        if (cuts && cuts->size() != lines.count) throw nb::value_error("one cut for each merge");
        std::vector<ork::Merge> made;
        { nb::gil_scoped_release unlocked; made = ork::merges_as_listed(tokens, flags, lines, cuts ? cuts->data() : nullptr); }
        return numbers<ork::Merge, 3>(std::move(made));
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}

}  // namespace
// --- end of sources ---------------------------------------------------------------------------

// --- kernels: arrays, KV cache, operations ----------------------------------------------------
namespace {

using namespace ork;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRow = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) { if (!ok) throw nb::value_error(what); }

constexpr int64_t MAX_DIM = int64_t(1) << 31, MAX_ELEMENTS = int64_t(1) << 40;   // products of three stay far below 2^63

std::unique_ptr<Array> new_array(int64_t rows, int64_t cols) {
    require(rows >= 0 && cols >= 0 && rows <= MAX_DIM && cols <= MAX_DIM, "array shape");
    if (rows * cols > MAX_ELEMENTS) throw std::bad_alloc();
    return std::make_unique<Array>(rows, cols);
}

std::unique_ptr<Array> array_from(Floats x) {
    auto a = new_array((int64_t)x.shape(0), (int64_t)x.shape(1));
    for (int64_t i = 0; i < a->rows; i++) std::memcpy(a->mat().data + i * a->stride, x.data() + i * a->cols, sizeof(float) * a->cols);
    return a;
}

std::unique_ptr<Array> like(const Array& x) { return std::make_unique<Array>(x.rows, x.cols); }

Rotation rotation_of(const Array* signs, int64_t block, int64_t K, const Array* mix) {
    require(signs || !mix, "blocks are mixed only where they are rotated");
    if (!signs) return {};
    require(signs->rows > 0 && signs->cols == K && block > 0 && (block & (block - 1)) == 0 && K % block == 0, "rotation does not fit the rows");
    if (!mix) return {signs->mat().data, block};
    const int64_t m = K / block;
    require(m <= MIX_MAX && mix->rows == 1 && mix->cols == m * m, "mixing matrix does not fit the rotation");
    return {signs->mat().data, block, mix->mat().data, m};
}

void require_group(int64_t group, int64_t Kp) { require(group == 0 || (group > 0 && group % 32 == 0 && Kp % group == 0), "group does not divide the rows"); }

int64_t end_of(const Slice& s) { return (int64_t)s.n0 + s.n; }

void linear(const Array& x, const QuantisedRows* rows, const std::vector<const Slice*>& slices, const std::vector<Array*>& outs, nb::list biases) {
    require(slices.size() == outs.size() && nb::len(biases) == outs.size(), "one output and one bias (or None) a slice");
    std::vector<LinearJob> jobs;
    for (size_t i = 0; i < slices.size(); i++) {
        require(slices[i] && outs[i], "a slice or an output is None");
        const Slice& s = *slices[i];
        const Mat out = outs[i]->mat();
        require(out.rows == x.rows && end_of(s) <= out.stride, "output does not fit the slice");
        if (is_quantised(s.codec)) {
            require(rows && rows->M == x.rows && rows->Kp == s.Kp, "quantised rows do not fit the slice");
            require(s.group == 0 || s.group == rows->group, "rows are not quantised in the groups of the slice");
        }
        else require(x.cols <= s.Kp, "rows do not fit the slice");
        const float* bias = nullptr;
        if (!biases[i].is_none()) {
            require(nb::isinstance<Array>(biases[i]), "a bias is an Array or None");
            const Array& b = nb::cast<const Array&>(biases[i]);
            require(b.rows > 0 && end_of(s) <= b.stride, "bias does not fit the slice");
            bias = b.mat().data;
        }
        jobs.push_back({s, out, bias});
    }
    Rows view{};
    if (rows) view = rows->view();
    {
        nb::gil_scoped_release unlocked;
        op_linear(x.mat(), rows ? &view : nullptr, jobs);
    }
}

using Doubles = nb::ndarray<double, nb::c_contig, nb::device::cpu>;
using OutInts = nb::ndarray<int32_t, nb::c_contig, nb::device::cpu>;

void require_targets(const Array& logits, const Ints& targets) {
    require((int64_t)targets.shape(0) == logits.rows && logits.cols > 0, "one target a row");
    for (size_t i = 0; i < targets.shape(0); i++) require(targets.data()[i] >= 0 && targets.data()[i] < logits.cols, "target outside of the vocabulary");
}

// The k largest, best first, equal values by index: (indices, values).
nb::tuple top_k(Floats logits, int64_t row, int64_t k) {
    require(row >= 0 && row < (int64_t)logits.shape(0), "no such row");
    const int64_t n = (int64_t)logits.shape(1);
    const float* x = logits.data() + row * n;
    if (k <= 0 || k > n) k = n;
    std::vector<int32_t> order((size_t)n);
    {
        nb::gil_scoped_release unlocked;
        for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
        auto better = [x](int32_t a, int32_t b) {   // NaN behind all numbers: the sort needs an order
            const float p = x[a], q = x[b];
            if (p != p || q != q) return (p != p) == (q != q) ? a < b : q != q;
            return p > q || (p == q && a < b);
        };
        if (k < n) std::nth_element(order.begin(), order.begin() + k, order.end(), better);
        std::sort(order.begin(), order.begin() + k, better);
    }
    nb::list ids, values;
    for (int64_t i = 0; i < k; i++) { ids.append(order[i]); values.append(x[order[i]]); }
    return nb::make_tuple(ids, values);
}

// Quantises weight rows into the given arrays; -1, or the first row that holds a value that is not finite.
int64_t quantise_weights(int codec, Floats rows, int64_t group, std::optional<FloatRow> weight, FloatRow ratios, int refine, int headroom,
                         nb::ndarray<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> codes,
                         nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> channel,
                         std::optional<nb::ndarray<uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>> groups) {
    const int64_t n = (int64_t)rows.shape(0), K = (int64_t)rows.shape(1), Kp = (int64_t)codes.shape(1);
    require(is_quantised(Codec(codec)), "codec");
    require(K > 0 && group >= 0 && group % 32 == 0 && (group == 0 || K % group == 0), "group");
    require((int64_t)codes.shape(0) == n && Kp % 32 == 0 && Kp >= K && (int64_t)channel.size() == n, "output shapes");
    require(groups.has_value() == (group > 0) && (!group || ((int64_t)groups->shape(0) == n && (int64_t)groups->shape(1) == K / group)), "group scales");
    require(headroom >= 0 && headroom < 32 && refine >= 0, "headroom, refine");
    std::vector<float> padded;
    if (weight) {
        require((int64_t)weight->size() == K, "one weight an input");
        padded.assign((K + 15) / 16 * 16, 0.0f);
        std::copy(weight->data(), weight->data() + K, padded.begin());
    }
    const QuantWeights q = {Codec(codec), K, Kp, group, weight ? padded.data() : nullptr, ratios.data(), (int64_t)ratios.size(), refine, headroom};
    nb::gil_scoped_release unlocked;
    return kernels()->quantise_weights(q, rows.data(), n, codes.data(), channel.data(), groups ? groups->data() : nullptr);
}

void bind_kernels(nb::module_& m) {
    m.attr("KV_BLOCK") = KV_BLOCK;
    m.def("isa_names", [] {
        const char* names[8];
        nb::list out;
        for (int i = 0, n = kernel_names(names, 8); i < n; i++) out.append(names[i]);
        return out;
    });
    m.def("isa", [] { return std::string(kernels()->name); });
    m.def("choose_isa", [](const std::string& name) { require(choose_kernels(name.c_str()), "this processor does not run that instruction set"); });
    m.def("threads", &pool_threads);
    m.def("set_threads", [](int n) { require(n >= 1 && n <= 256, "threads must lie in 1..256"); nb::gil_scoped_release unlocked; pool_resize(n); });

    nb::class_<Array>(m, "Array")
        .def(nb::new_(&new_array))
        .def_static("of", &array_from)
        .def_ro("rows", &Array::rows)
        .def_ro("cols", &Array::cols)
        .def("numpy", [](nb::handle self) {
            const Array& a = nb::cast<const Array&>(self);
            const size_t shape[2] = {(size_t)a.rows, (size_t)a.cols};
            const int64_t strides[2] = {a.stride, 1};
            return nb::ndarray<nb::numpy, float>(a.mat().data, 2, shape, self, strides);
        });
    nb::class_<QuantisedRows>(m, "QuantisedRows")
        .def_ro("rows", &QuantisedRows::M)
        .def_ro("width", &QuantisedRows::Kp)
        .def_ro("group", &QuantisedRows::group)
        .def("codes", [](nb::handle self) {
            const QuantisedRows& r = nb::cast<const QuantisedRows&>(self);
            const size_t shape[2] = {(size_t)r.M, (size_t)r.Kp};
            return nb::ndarray<nb::numpy, int8_t>(r.codes, 2, shape, self);
        })
        .def("scales", [](nb::handle self) {
            const QuantisedRows& r = nb::cast<const QuantisedRows&>(self);
            const size_t shape[2] = {(size_t)r.M, (size_t)r.groups()};
            return nb::ndarray<nb::numpy, float>(r.scales, r.group ? 2 : 1, shape, self);
        })
        .def_static("of", [](Codes codes, int64_t group) {
            const int64_t M = (int64_t)codes.shape(0), Kp = (int64_t)codes.shape(1);
            require(Kp % 32 == 0, "rows must be padded to a multiple of 32");
            require_group(group, Kp);
            auto r = std::make_unique<QuantisedRows>(M, Kp, group);
            std::memcpy(r->codes, codes.data(), (size_t)(M * Kp));
            const int64_t run = group ? group : Kp;
            for (int64_t i = 0; i < M * r->groups(); i++) {
                int32_t sum = 0;
                for (int64_t k = 0; k < run; k++) {
                    sum += r->codes[i * run + k];
                    r->full_range |= r->codes[i * run + k] == -128;
                }
                r->sums[i] = sum;
                r->scales[i] = 1.0f;
            }
            return r;
        }, nb::arg("codes"), nb::arg("group") = 0);
    nb::class_<Slice>(m, "Slice")
        .def_ro("n0", &Slice::n0)
        .def_ro("n", &Slice::n)
        .def_prop_ro("scales_address", [](const Slice& s) { return (uintptr_t)s.scales; })
        .def_ro("group", &Slice::group)
        .def("__init__", [](Slice* self, int codec, uintptr_t codes, uintptr_t scales, int64_t Kp, int64_t ks, int32_t n0, int32_t n, int64_t group, uintptr_t group_scales) {
            require(codec >= 0 && codec <= (int)Codec::f16 && codes && codes % 64 == 0 && scales % 64 == 0 && group_scales % 64 == 0, "codec or alignment");
            require(Kp > 0 && Kp <= MAX_DIM && Kp % 32 == 0 && ks > 0 && ks % 32 == 0 && Kp % ks == 0 && n0 >= 0 && n > 0 && n % 64 == 0, "slice shape");
            require_group(group, ks);
            require(is_quantised((Codec)codec) ? scales && (group > 0) == (group_scales != 0) : group == 0, "scales do not fit the codec and group");
            new (self) Slice{(Codec)codec, (const uint8_t*)codes, (const float*)scales, (const uint16_t*)group_scales, Kp, ks, n0, n, group};
        }, nb::arg("codec"), nb::arg("codes"), nb::arg("scales"), nb::arg("Kp"), nb::arg("ks"), nb::arg("n0"), nb::arg("n"), nb::arg("group") = 0, nb::arg("group_scales") = 0);
    nb::class_<Batch>(m, "Batch").def("__init__", [](Batch* self, Ints positions, Ints slots, IntTable runs, IntTable table) {
        new (self) Batch();
        const int64_t M = (int64_t)positions.shape(0);
        require((int64_t)slots.shape(0) == M && runs.shape(1) == 4, "batch shape");
        self->positions.assign(positions.data(), positions.data() + M);
        self->slots.assign(slots.data(), slots.data() + M);
        self->table.assign(table.data(), table.data() + table.size());
        self->table_stride = (int64_t)table.shape(1);
        for (size_t i = 0; i < runs.shape(0); i++) {
            const int32_t* r = runs.data() + 4 * i;
            require(r[0] >= 0 && r[1] > 0 && (int64_t)r[0] + r[1] <= M && r[2] >= 0 && r[2] < (int64_t)table.shape(0) && r[3] >= 0 &&
                        ((int64_t)r[3] + r[1] - 1) / KV_BLOCK < self->table_stride, "run outside of the batch or its block table");
            self->runs.push_back({r[0], r[1], r[2], r[3]});
        }
    });
    nb::class_<KvCache>(m, "KvCache")
        .def(nb::new_([](int64_t layers, int64_t heads, int64_t dim, int64_t blocks, bool half) {
            require(layers > 0 && heads > 0 && dim > 0 && blocks > 0, "cache shape");
            if (layers > 1 << 16 || heads > 1 << 16 || dim > 1 << 16 || blocks > MAX_DIM / KV_BLOCK ||
                (double)layers * heads * dim * blocks > 1e14) throw std::bad_alloc();
            return std::make_unique<KvCache>(layers, heads, dim, blocks, half);
        }), nb::arg("layers"), nb::arg("heads"), nb::arg("dim"), nb::arg("blocks"), nb::arg("half"))
        .def_ro("blocks", &KvCache::blocks)
        .def("block_bytes", &KvCache::block_bytes);

    m.def("linear", &linear, nb::arg("x"), nb::arg("rows").none(), nb::arg("slices"), nb::arg("outs"), nb::arg("biases"));
    m.def("accumulate", [](const QuantisedRows& rows, const Slice& s, nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
        require(is_quantised(s.codec) && rows.Kp == s.Kp && (int64_t)out.shape(0) == rows.M * rows.groups() && end_of(s) <= (int64_t)out.shape(1), "accumulators do not fit");
        nb::gil_scoped_release unlocked;
        op_accumulate(rows.view(), s, out.data(), (int64_t)out.shape(1));
    }, nb::arg("rows"), nb::arg("slice"), nb::arg("out").noconvert());
    m.def("accumulate_at", [](uintptr_t a, int64_t pitch, int64_t M, int64_t K, uintptr_t w, int64_t N, uintptr_t out, int64_t out_pitch) {
        require(M > 0 && K > 0 && K % 32 == 0 && N > 0 && N % 32 == 0 && pitch >= K && out_pitch >= N && out % 4 == 0, "matmul shape");
        nb::gil_scoped_release unlocked;
        op_accumulate_at((const int8_t*)a, pitch, M, K, (const uint8_t*)w, N, (int32_t*)out, out_pitch);
    });
    m.def("copy_codes", [](const QuantisedRows& rows, uintptr_t to, int64_t begin, std::optional<int64_t> end) {
        const int64_t last = end.value_or(rows.M);
        require(0 <= begin && begin <= last && last <= rows.M, "rows that are not there");
        std::memcpy((void*)to, rows.codes + begin * rows.Kp, (size_t)((last - begin) * rows.Kp));
    }, nb::arg("rows"), nb::arg("to"), nb::arg("begin") = 0, nb::arg("end").none() = nb::none());
    m.def("quantise", [](const Array& x, const Array* signs, int64_t block, int64_t group, const Array* mix, int limit) {
        const Rotation r = rotation_of(signs, block, x.cols, mix);
        const int64_t Kp = (x.cols + 31) / 32 * 32;
        require_group(group, Kp);
        require(limit >= 1 && limit <= 127, "limit must lie in 1..127");
        auto q = std::make_unique<QuantisedRows>(x.rows, Kp, group);
        nb::gil_scoped_release unlocked;
        op_quantise(x.mat(), r, limit, *q);
        return q;
    }, nb::arg("x"), nb::arg("signs").none(), nb::arg("block"), nb::arg("group") = 0, nb::arg("mix").none() = nb::none(), nb::arg("limit") = 127);
    m.def("inflate", [](int codec, Bytes src, nb::ndarray<int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> dst, int64_t tiles) {
        const int64_t held = (int64_t)src.size() / 1024, run = tiles ? tiles : held;
        require(codec == (int)Codec::i4 || codec == (int)Codec::nf4, "only 4-bit codes are inflated");
        require(src.size() % 1024 == 0 && dst.size() == 2 * src.size() && run >= 0 && (held == 0 || (run > 0 && held % run == 0)), "tiles do not fit");
        nb::gil_scoped_release unlocked;
        if (held) op_inflate((Codec)codec, src.data(), held / run, run, dst.data());
    }, nb::arg("codec"), nb::arg("src"), nb::arg("dst").noconvert(), nb::arg("tiles") = 0);
    m.def("rotate", [](nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x, const Array& signs, int64_t block, bool inverse, const Array* mix) {
        const Rotation r = rotation_of(&signs, block, (int64_t)x.shape(1), mix);
        nb::gil_scoped_release unlocked;
        const int64_t K = (int64_t)x.shape(1);
        parallel_runs((int64_t)x.shape(0), [&](int64_t b, int64_t e, int) { kernels()->rotate(x.data() + b * K, e - b, K, K, r, inverse); });
    }, nb::arg("x").noconvert(), nb::arg("signs"), nb::arg("block"), nb::arg("inverse") = false, nb::arg("mix").none() = nb::none());   // a copy would swallow the result
    m.def("rms_norm", [](const Array& x, const Array& w, float eps) {
        require(w.rows > 0 && w.cols == x.cols, "norm weight does not fit the rows");
        auto out = like(x);
        nb::gil_scoped_release unlocked;
        op_rms_norm(x.mat(), w.mat().data, eps, out->mat());
        return out;
    });
    m.def("head_norm", [](Array& x, const Array& w, float eps) {
        require(w.rows > 0 && w.cols > 0 && x.cols % w.cols == 0, "norm weight does not fit the heads");
        nb::gil_scoped_release unlocked;
        op_head_norm(x.mat(), w.cols, w.mat().data, eps);
    });
    m.def("rope_table", [](const Batch& b, const std::vector<double>& inv_freq, float magnitude) {
        auto out = new_array((int64_t)b.positions.size(), (int64_t)(2 * inv_freq.size()));
        nb::gil_scoped_release unlocked;
        op_rope_table(b, inv_freq, magnitude, out->mat());
        return out;
    });
    m.def("rope", [](Array& x, int64_t dim, bool halves, const Array& table) {
        require(dim > 0 && x.cols % dim == 0 && table.cols <= dim && table.cols % 2 == 0 && table.rows == x.rows, "rotary table does not fit the heads");
        nb::gil_scoped_release unlocked;
        op_rope(x.mat(), dim, table.cols, halves ? RopePairs::halves : RopePairs::adjacent, table.mat());
    });
    m.def("gate", [](int kind, const Array& g, const Array& u) {
        require((kind == 0 || kind == 1) && g.rows == u.rows && g.cols == u.cols, "gate and value differ in shape");
        auto out = like(g);
        nb::gil_scoped_release unlocked;
        op_gate((Gate)kind, g.mat(), u.mat(), out->mat());
        return out;
    });
    m.def("add", [](const Array& a, const Array& b) {
        require(a.rows == b.rows && a.cols == b.cols, "terms differ in shape");
        auto out = like(a);
        nb::gil_scoped_release unlocked;
        op_add(a.mat(), b.mat(), out->mat());
        return out;
    });
    m.def("scale", [](Array& x, float f) { nb::gil_scoped_release unlocked; op_scale(x.mat(), f); });
    m.def("softcap", [](Array& x, float cap) { require(cap > 0, "soft cap must be positive"); nb::gil_scoped_release unlocked; op_softcap(x.mat(), cap); });
    m.def("take", [](const Array& x, Ints rows) {
        auto out = new_array((int64_t)rows.shape(0), x.cols);
        for (int64_t i = 0; i < out->rows; i++) {
            require(rows.data()[i] >= 0 && rows.data()[i] < x.rows, "no such row");
            std::memcpy(out->mat().data + i * out->stride, x.mat().data + rows.data()[i] * x.stride, sizeof(float) * x.stride);
        }
        return out;
    });
    m.def("gather", [](const std::vector<const Slice*>& slices, Ints ids, int64_t K, int64_t N, const Array* signs, int64_t block, const Array* mix) {
        const Rotation r = rotation_of(signs, block, K, mix);
        std::vector<Slice> views;
        for (const Slice* s : slices) { require(s && K >= 0 && K <= s->Kp, "rows do not fit the slice"); views.push_back(*s); }
        for (size_t i = 0; i < ids.shape(0); i++) {
            bool found = ids.data()[i] >= 0 && ids.data()[i] < N;
            if (found) { found = false; for (const Slice& s : views) found |= ids.data()[i] >= s.n0 && ids.data()[i] < s.n0 + s.n; }
            require(found, "token outside of the vocabulary");
        }
        auto out = new_array((int64_t)ids.shape(0), K);
        nb::gil_scoped_release unlocked;
        op_gather(views, ids.data(), (int64_t)ids.shape(0), K, r, out->mat());
        return out;
    }, nb::arg("slices"), nb::arg("ids"), nb::arg("K"), nb::arg("N"), nb::arg("signs").none(), nb::arg("block"), nb::arg("mix").none() = nb::none());
    m.def("attention", [](KvCache& cache, int64_t layer, const Batch& b, const Array& q, const Array& k, const Array& v, int64_t heads, float scale, int64_t window, float softcap) {
        require(layer >= 0 && layer < cache.layers && heads > 0 && heads % cache.heads == 0, "layer or heads");
        require(q.rows == (int64_t)b.positions.size() && k.rows == q.rows && v.rows == q.rows, "rows differ from the batch");
        require(q.cols == heads * cache.dim && k.cols == cache.heads * cache.dim && v.cols == k.cols, "heads differ from the cache");
        for (int32_t t : b.table) require(t >= 0 && t < cache.blocks, "block outside of the cache");
        for (int32_t s : b.slots) require(s >= 0 && s < cache.blocks * KV_BLOCK, "slot outside of the cache");
        auto out = std::make_unique<Array>(q.rows, q.cols);
        nb::gil_scoped_release unlocked;
        op_attention(cache.layer(layer), b, q.mat(), k.mat(), v.mat(), heads, scale, window, softcap, out->mat());
        return out;
    });
    m.def("peak", [](bool integers, int64_t iterations) {
        int64_t count = 0;
        double seconds;
        { nb::gil_scoped_release unlocked; seconds = op_peak(integers, iterations, &count); }
        return std::make_pair(count, seconds);
    });
    m.def("read_memory", [](nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> x) {
        nb::gil_scoped_release unlocked;
        op_read(x.data(), (int64_t)x.size());
    });
    m.def("score", [](const Array& logits, Ints targets, Doubles nll, OutInts top) {
        require_targets(logits, targets);
        require((int64_t)nll.size() == logits.rows && (int64_t)top.size() == logits.rows, "results do not fit the rows");
        nb::gil_scoped_release unlocked;
        op_score(logits.mat(), targets.data(), nll.data(), top.data());
    }, nb::arg("logits"), nb::arg("targets"), nb::arg("nll").noconvert(), nb::arg("top").noconvert());
    m.def("compare", [](const Array& base, const Array& other, Ints targets, Doubles nll, OutInts top, Doubles kl) {
        require_targets(base, targets);
        require(other.rows == base.rows && other.cols == base.cols, "the two models' logits differ in shape");
        require((int64_t)nll.size() == 2 * base.rows && (int64_t)top.size() == 2 * base.rows && (int64_t)kl.size() == base.rows, "results do not fit the rows");
        nb::gil_scoped_release unlocked;
        op_compare(base.mat(), other.mat(), targets.data(), nll.data(), top.data(), kl.data());
    }, nb::arg("base"), nb::arg("other"), nb::arg("targets"), nb::arg("nll").noconvert(), nb::arg("top").noconvert(), nb::arg("kl").noconvert());
    m.def("quantise_weights", &quantise_weights, nb::arg("codec"), nb::arg("rows"), nb::arg("group"), nb::arg("weight").none(), nb::arg("ratios"),
          nb::arg("refine"), nb::arg("headroom"), nb::arg("codes").noconvert(), nb::arg("channel").noconvert(), nb::arg("groups").none().noconvert());
    m.def("top_k", &top_k);
    m.def("softmax", [](const std::vector<float>& x, float inv_temperature) {
        require(!x.empty(), "no values");
        std::vector<float> out(x.size());
        kernels()->softmax(x.data(), (int64_t)x.size(), inv_temperature, out.data());
        return out;
    });
}

}  // namespace
// --- end of kernels ---------------------------------------------------------------------------

// --- GPTQ -------------------------------------------------------------------------------------
namespace {

template <class T> using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void gptq_round(int codec, Matrix<float> work, Matrix<const float> upper, FloatRow scales, Matrix<int8_t> codes, Matrix<float> errors,
                int64_t block, int64_t begin, int64_t end) {
    const int64_t n = (int64_t)work.shape(0), K = (int64_t)work.shape(1), Kp = (int64_t)codes.shape(1), block_end = block + (int64_t)errors.shape(1);
    require(is_quantised((Codec)codec), "codec");
    require((int64_t)upper.shape(0) == K && (int64_t)upper.shape(1) == K && Kp >= K, "factor or codes do not fit the rows");
    require((int64_t)codes.shape(0) == n && (int64_t)errors.shape(0) == n && (int64_t)scales.size() == n, "scales, codes or errors do not fit the rows");
    require(block >= 0 && begin >= block && begin < end && end <= block_end && block_end <= K && errors.shape(1) <= (size_t)GPTQ_BLOCK_MAX, "columns");
    nb::gil_scoped_release unlocked;
    ork::gptq_round({(Codec)codec, work.data(), upper.data(), scales.data(), codes.data(), errors.data(), n, K, Kp, block, begin, end, block_end});
}

void bind_gptq(nb::module_& m) {
    m.def("gptq_round", &gptq_round, nb::arg("codec"), nb::arg("work").noconvert(), nb::arg("upper").noconvert(), nb::arg("scales"),
          nb::arg("codes").noconvert(), nb::arg("errors").noconvert(), nb::arg("block"), nb::arg("begin"), nb::arg("end"));
}

}  // namespace
// --- end of GPTQ ------------------------------------------------------------------------------

// --- experts and short convolutions -------------------------------------------------------------
namespace {

std::vector<Range> ranges_of(const IntTable& table, int64_t rows) {
    require(table.shape(1) == 2, "ranges are [n, 2]");
    std::vector<Range> ranges;
    for (size_t i = 0; i < table.shape(0); i++) {
        const int64_t b = table.data()[2 * i], e = table.data()[2 * i + 1];
        require(0 <= b && b <= e && e <= rows, "a range outside of the rows");
        ranges.push_back({b, e});
    }
    return ranges;
}

void require_gathered(const Routes& r, int64_t rows) { require(r.rows == rows, "routes of other rows"); }

template <class T> nb::ndarray<nb::numpy, T> view_of(nb::handle self, const std::vector<T>& v, size_t rows, size_t cols) {
    const size_t shape[2] = {rows, cols};
    return nb::ndarray<nb::numpy, T>((void*)v.data(), cols ? 2 : 1, shape, self);
}

void linear_experts(const Array& x, const QuantisedRows* rows, const std::vector<const Slice*>& slices, IntTable ranges, const std::vector<Array*>& outs) {
    require(slices.size() == outs.size() && slices.size() == ranges.shape(0), "one range and one output a slice");
    const int64_t M = rows ? rows->M : x.rows;
    const std::vector<Range> of = ranges_of(ranges, M);
    std::vector<ExpertJob> jobs;
    for (size_t i = 0; i < slices.size(); i++) {
        require(slices[i] && outs[i], "a slice or an output is None");
        const Slice& s = *slices[i];
        const Mat out = outs[i]->mat();
        require(out.rows == M && end_of(s) <= out.stride, "output does not fit the slice");
        if (is_quantised(s.codec)) require(rows && rows->Kp == s.Kp && (s.group == 0 || s.group == rows->group), "quantised rows do not fit the slice");
        else require(x.rows == M && x.cols <= s.Kp, "rows do not fit the slice");
        if (of[i].begin < of[i].end) jobs.push_back({s, of[i], out});
    }
    Rows view{};
    if (rows) view = rows->view();
    nb::gil_scoped_release unlocked;
    if (!jobs.empty()) op_linear_experts(x.mat(), rows ? &view : nullptr, jobs);
}

void bind_experts(nb::module_& m) {
    m.attr("EXPERTS_MAX") = EXPERTS_MAX;
    m.attr("TAPS_MAX") = TAPS_MAX;
    nb::class_<Routes>(m, "Routes")
        .def_ro("rows", &Routes::rows)
        .def_ro("experts", &Routes::experts)
        .def_ro("top_k", &Routes::top_k)
        .def("ids", [](nb::handle self) { const Routes& r = nb::cast<const Routes&>(self); return view_of(self, r.ids, r.rows, r.top_k); })
        .def("weights", [](nb::handle self) { const Routes& r = nb::cast<const Routes&>(self); return view_of(self, r.weights, r.rows, r.top_k); })
        .def("sources", [](nb::handle self) { const Routes& r = nb::cast<const Routes&>(self); return view_of(self, r.sources, r.gathered(), 0); })
        .def("offsets", [](const Routes& r) { return r.offsets; })
        .def("active", [](const Routes& r) {
            std::vector<int32_t> active;
            for (int64_t e = 0; e < r.experts; e++) if (r.offsets[e] < r.offsets[e + 1]) active.push_back((int32_t)e);
            return active;
        });
    m.def("route", [](const Array& logits, int64_t top_k, bool sigmoid, bool normalise, float scale, const Array* bias, int64_t groups, int64_t used) {
        const int64_t n = logits.cols;
        require(n > 0 && n <= EXPERTS_MAX && top_k > 0 && top_k <= n, "experts");
        require(groups > 0 && n % groups == 0 && used > 0 && used <= groups && top_k <= used * (n / groups), "groups");
        require(logits.rows * top_k < MAX_DIM, "too many rows");
        require(!bias || (bias->rows == 1 && bias->cols == n), "one bias an expert");
        auto routes = std::make_unique<Routes>();
        int64_t bad;
        {
            nb::gil_scoped_release unlocked;
            bad = op_route(logits.mat(), {top_k, sigmoid, normalise, scale, bias ? bias->mat().data : nullptr, groups, used}, *routes);
        }
        return bad < 0 ? nb::cast(std::move(routes)) : nb::cast(bad);
    }, nb::arg("logits"), nb::arg("top_k"), nb::arg("sigmoid"), nb::arg("normalise"), nb::arg("scale"), nb::arg("bias").none(), nb::arg("groups"), nb::arg("used"));
    m.def("gather_rows", [](const QuantisedRows& rows, const Routes& r) {
        require_gathered(r, rows.M);
        auto out = std::make_unique<QuantisedRows>(r.gathered(), rows.Kp, rows.group);
        nb::gil_scoped_release unlocked;
        op_gather_rows(rows.view(), r, *out);
        return out;
    });
    m.def("gather_floats", [](const Array& x, const Routes& r) {
        require_gathered(r, x.rows);
        auto out = new_array(r.gathered(), x.cols);
        nb::gil_scoped_release unlocked;
        op_gather_floats(x.mat(), r, out->mat());
        return out;
    });
    m.def("linear_experts", &linear_experts, nb::arg("x"), nb::arg("rows").none(), nb::arg("slices"), nb::arg("ranges"), nb::arg("outs"));
    m.def("empty_rows", [](int64_t rows, int64_t cols, int64_t group) {
        require(rows >= 0 && cols > 0 && rows <= MAX_DIM && cols <= MAX_DIM && rows * cols <= MAX_ELEMENTS, "rows");
        const int64_t Kp = (cols + 31) / 32 * 32;
        require_group(group, Kp);
        return std::make_unique<QuantisedRows>(rows, Kp, group);
    });
    m.def("gate_experts", [](int kind, Array& g, const Array& u, IntTable ranges, QuantisedRows* out, const Array* signs, int64_t block, const Array* mix, int limit) {
        require((kind == 0 || kind == 1) && g.rows == u.rows && g.cols == u.cols, "gate and value differ in shape");
        const Rotation r = rotation_of(signs, block, g.cols, mix);
        require(!out || (out->M == g.rows && out->Kp == (g.cols + 31) / 32 * 32 && limit >= 1 && limit <= 127), "rows do not fit");
        const std::vector<Range> of = ranges_of(ranges, g.rows);
        nb::gil_scoped_release unlocked;
        op_gate_experts((Gate)kind, g.mat(), u.mat(), of, r, limit, out);
    }, nb::arg("kind"), nb::arg("g"), nb::arg("u"), nb::arg("ranges"), nb::arg("out").none(), nb::arg("signs").none(), nb::arg("block"), nb::arg("mix").none(), nb::arg("limit"));
    m.def("weighted_sum", [](const Array& y, const Routes& r) {
        require(y.rows == r.gathered(), "rows are not the gathered ones");
        auto out = new_array(r.rows, y.cols);
        nb::gil_scoped_release unlocked;
        op_weighted_sum(y.mat(), r, out->mat());
        return out;
    });
    m.def("gate_rows", [](const Array& x, const Array& weight, Array& y) {
        require(weight.rows == 1 && weight.cols == x.cols && y.rows == x.rows, "gate does not fit the rows");
        nb::gil_scoped_release unlocked;
        op_gate_rows(x.mat(), weight.mat().data, y.mat());
    });
    nb::class_<ConvCache>(m, "ConvCache")
        .def(nb::new_([](int64_t layers, int64_t width, int64_t blocks, bool half) {
            require(layers > 0 && width > 0 && blocks > 0, "cache shape");
            if (layers > 1 << 16 || width > 1 << 20 || blocks > MAX_DIM / KV_BLOCK || (double)layers * width * blocks > 1e14) throw std::bad_alloc();
            return std::make_unique<ConvCache>(layers, width, blocks, half);
        }), nb::arg("layers"), nb::arg("width"), nb::arg("blocks"), nb::arg("half"))
        .def("block_bytes", &ConvCache::block_bytes)
        .def("cold_bytes", [](ConvCache& c, int64_t rows) {
            require(rows >= 0 && rows <= KV_BLOCK, "rows of a block");
            return c.cold_bytes(rows);
        })
        .def("cool", [](ConvCache& c, int64_t block, int64_t rows) {
            require(block >= 0 && block < c.blocks && rows >= 0 && rows <= KV_BLOCK, "rows of a block");
            c.cool(block, rows);
        });
    m.def("short_conv", [](ConvCache& cache, int64_t layer, const Batch& b, const Array& bcx, const Array& taps) {
        require(layer >= 0 && layer < cache.layers, "layer");
        require(bcx.rows == (int64_t)b.positions.size() && bcx.cols == 3 * cache.width, "rows do not fit the cache");
        require(taps.rows > 0 && taps.rows <= TAPS_MAX && taps.cols == cache.width, "taps do not fit the cache");
        for (int32_t t : b.table) require(t >= 0 && t < cache.blocks, "block outside of the cache");
        for (int32_t s : b.slots) require(s >= 0 && s < cache.blocks * KV_BLOCK, "slot outside of the cache");
        auto out = new_array(bcx.rows, cache.width);
        nb::gil_scoped_release unlocked;
        op_short_conv(cache.layer(layer), b, bcx.mat(), taps.mat(), out->mat());
        return out;
    });
}

}  // namespace
// --- end of experts -----------------------------------------------------------------------------

// --- npu: what the host does beside it ----------------------------------------------------------
namespace {

using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void bind_npu(nb::module_& m) {
    m.def("retile", [](int codec, Bytes src, int64_t n, int64_t Kp, int64_t ks, int64_t run, BytesOut dst) {
        const Codec c = (Codec)codec;
        require(is_quantised(c) && n > 0 && n <= MAX_DIM && n % 64 == 0 && Kp > 0 && Kp <= MAX_DIM, "codec or shape");
        require(ks > 0 && run > 0 && ks % 32 == 0 && run % 32 == 0 && Kp % ks == 0 && Kp % run == 0, "K slices");
        const int64_t bytes = c == Codec::i8 ? n * Kp : n * Kp / 2, out = (int64_t)dst.size();
        require((int64_t)src.size() == bytes && (out == bytes || out == n * Kp), "bytes that do not fit the shape");
        nb::gil_scoped_release unlocked;
        op_retile(c, src.data(), n, Kp, ks, out != bytes, run, dst.data());
    }, nb::arg("codec"), nb::arg("src"), nb::arg("n"), nb::arg("Kp"), nb::arg("ks"), nb::arg("run"), nb::arg("dst").noconvert());
    m.def("least_int4", [](Bytes codes) { nb::gil_scoped_release unlocked; return op_least_int4(codes.data(), (int64_t)codes.size()); });
    m.def("pack_int4", [](const QuantisedRows& rows, int64_t ks, int64_t pitch, uintptr_t to) {
        require(ks > 0 && ks % 32 == 0 && rows.Kp % ks == 0 && pitch >= ks / 2, "K slices");
        bool fits;
        { nb::gil_scoped_release unlocked; fits = op_pack_int4(rows.view(), ks, pitch, (uint8_t*)to); }
        require(fits, "codes outside of -8..7");
    });
    m.def("scale_partial_sums", [](const std::vector<uintptr_t>& parts, bool half, int64_t row, int64_t block, int64_t m0, int64_t m1, const QuantisedRows& rows, const Slice& s, Array& out, const Array* bias) {
        const int64_t groups = rows.group ? rows.Kp / rows.group : 1;
        require(!parts.empty() && (int64_t)parts.size() % groups == 0 && row > 0 && block > 0, "parts that do not fit the groups");
        require(is_quantised(s.codec) && s.Kp == rows.Kp && (!s.group || s.group == rows.group), "rows do not fit the slice");
        require(out.rows == rows.M && 0 <= m0 && m0 < m1 && m1 <= rows.M && end_of(s) <= out.stride, "sums do not fit the output");
        require(!bias || (bias->rows > 0 && end_of(s) <= bias->stride), "bias does not fit the slice");
        std::vector<const void*> p;
        for (uintptr_t x : parts) p.push_back((const void*)x);
        nb::gil_scoped_release unlocked;
        op_scale_partial_sums({p.data(), (int64_t)p.size(), row, block, m0, half}, m1, rows.view(), s, out.mat(), bias ? bias->mat().data : nullptr);
    }, nb::arg("parts"), nb::arg("half"), nb::arg("row"), nb::arg("block"), nb::arg("m0"), nb::arg("m1"), nb::arg("rows"), nb::arg("slice"), nb::arg("out"), nb::arg("bias").none());
}

}  // namespace
// --- end of npu ---------------------------------------------------------------------------------

NB_MODULE(_core, m) {
    m.doc() = "ork's kernels";
    // --- sources bindings ---
    nb::list types;
    for (size_t i = 0; i < ork::kTensorTypeCount; i++) {
        const ork::TensorType& t = ork::kTensorTypes[i];
        types.append(nb::make_tuple(t.id, t.name, t.block, t.bytes));
    }
    m.attr("tensor_types") = nb::tuple(types);
    m.def("dequantise", &py_dequantise, nb::arg("type"), nb::arg("src"), nb::arg("out").noconvert(), nb::arg("first") = 0);
    m.def("read_parts", &py_read_parts, nb::arg("fd"), nb::arg("offsets"), nb::arg("arrays"));
    m.def("scan_strings", &py_scan_strings, nb::arg("src"), nb::arg("offset"), nb::arg("starts").noconvert(), nb::arg("lengths").noconvert());
    bind_merges(m);
    // --- end of sources bindings ---
    bind_kernels(m);
    bind_gptq(m);
    bind_experts(m);
    bind_npu(m);
}

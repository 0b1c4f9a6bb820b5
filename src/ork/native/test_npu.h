// What the host does beside an NPU: weights tiled anew, rows packed, sums scaled. Part of test_kernels.
#pragma once
#include <cmath>
#include "npu.h"
#include "test_grouped.h"

namespace ork::test {
namespace {

// Partial sums with holes between rows and blocks of 64 columns, int32 or int16, one or several a group.
template <class T> void partial_sums(const Kernels& k, Trace& t, Codec codec, int64_t K, int64_t group, int64_t row_group, int64_t each, bool batch) {
    const int64_t M = 5, n = 128, n0 = 64, m0 = 1, groups = row_group ? K / row_group : 1, count = groups * each;
    Random r(K * 10 + row_group + each + batch);
    GroupedWeights w(codec, K, K, n, group, (int32_t)n0, r);
    const int64_t row = batch ? 256 : n + 16, block = batch ? (M - m0) * 256 : 64;
    std::vector<std::vector<T>> sums((size_t)count, std::vector<T>((size_t)(2 * (M - m0) * 256 + n)));
    std::vector<const void*> parts;
    for (auto& p : sums) { for (T& v : p) v = (T)((int32_t)r.bits() >> (sizeof(T) == 2 ? 16 : 6)); parts.push_back(p.data()); }
    const std::vector<float> scales = floats(r, M * groups, 0.5f, 0.4f), bias = floats(r, n0 + n, 0.0f, 9.0f);
    const Rows rows = {nullptr, scales.data(), nullptr, M, K, row_group, false};
    const PartialSums p = {parts.data(), count, row, block, m0, sizeof(T) == 2};
    t.at("partial_sums codec=%d K=%d group=%d rows' group=%d each=%d batch=%d", (int)codec, (int)K, (int)group, (int)row_group, (int)each, batch);
    Matrix plain(M, n0 + n, POISON), biased(M, n0 + n, POISON);
    k.scale_partial_sums(p, m0, M, rows, w.slice, plain.mat(), nullptr);
    k.scale_partial_sums(p, 2, 4, rows, w.slice, biased.mat(), bias.data());
    t.record(plain.v);
    t.record(biased.v);
    for (int64_t m = 0; t.oracle && m < M; m++)
        for (int64_t c = 0; c < n; c++) {
            auto sum = [&](int64_t first, int64_t number) {
                int64_t s = 0;
                for (int64_t i = first; i < first + number; i++) s += sums[(size_t)i][(size_t)((m - m0) * row + c / 64 * block + c % 64)];
                return (float)s;
            };
            float y = POISON;
            if (m >= m0 && !row_group) y = sum(0, count) * (scales[(size_t)m] * w.scales[(size_t)c]);
            else if (m >= m0) {
                y = 0;
                for (int64_t g = 0; g < groups; g++) {
                    const float a = scales[(size_t)(m * groups + g)];
                    y = std::fmaf(sum(g * each, each), group ? a * (float)half_value(w.group_plain[(size_t)(c * groups + g)]) : a, y);
                }
                y = w.scales[(size_t)c] * y;
            }
            t.close(plain.at(m, n0 + c), y, 0, "row", m * n + c);
            t.close(biased.at(m, n0 + c), m >= 2 && m < 4 ? y + bias[(size_t)(n0 + c)] : POISON, 0, "biased", m * n + c);
        }
}

void scale_partial_sums(const Kernels& k, Trace& t) {
    for (int64_t each : {1, 3}) {
        partial_sums<int32_t>(k, t, Codec::i8, 128, 0, 0, each, false);
        partial_sums<int32_t>(k, t, Codec::i8, 256, 0, 32, each, false);
        partial_sums<int32_t>(k, t, Codec::i8, 256, 64, 64, each, false);
        partial_sums<int16_t>(k, t, Codec::i4, 640, 0, 0, each, true);
        partial_sums<int16_t>(k, t, Codec::i4, 1280, 128, 128, each, true);
        partial_sums<int16_t>(k, t, Codec::i4, 96, 32, 32, each, false);
    }
}

// K slices of any length to any other, with inflation and without; and int4 rows.
void retile(const Kernels& k, Trace& t) {
    choose_kernels(k.name);
    struct { Codec codec; int64_t K, ks, run; } shapes[] = {{Codec::i8, 256, 256, 64}, {Codec::i8, 384, 192, 128}, {Codec::i4, 1280, 640, 1280}, {Codec::i4, 960, 480, 320},
                                                            {Codec::nf4, 256, 256, 32}, {Codec::nf4, 384, 192, 384}, {Codec::i4, 96, 96, 96}};
    for (auto s : shapes)
        for (int inflate = s.codec == Codec::nf4; inflate <= (s.codec != Codec::i8); inflate++) {
            const int64_t n = 128;
            Random r(s.K + s.run);
            GroupedWeights w(s.codec, s.K, s.ks, n, 0, 0, r);
            const bool nibbles = s.codec != Codec::i8 && !inflate;
            const int64_t G = nibbles ? 64 : 32;
            std::vector<uint8_t> out((size_t)(n * s.K / (nibbles ? 2 : 1)), 0x5a);
            t.at("retile codec=%d K=%d ks=%d run=%d inflate=%d", (int)s.codec, (int)s.K, (int)s.ks, (int)s.run, inflate);
            op_retile(s.codec, w.codes.data(), n, s.K, s.ks, inflate != 0, s.run, out.data());
            t.record((const int8_t*)out.data(), out.size());
            for (int64_t i = 0; t.oracle && i < n * s.K; i++) {
                const int64_t c = i / s.K, x = i % s.K, at = x / s.run * n * s.run + c / G * G * s.run + x % s.run / 32 * 32 * G + c % G * 32 + x % 32;
                const int got = nibbles ? integer_of(s.codec, out[(size_t)(at / 2)] >> (at % 2 ? 4 : 0) & 15) : (int8_t)out[(size_t)at];
                t.close(got, w.plain[(size_t)i], 0, "code", i);
            }
        }

    Random r(9);
    const int64_t M = 3, K = 192, ks = 96;
    std::vector<int8_t> a((size_t)(M * K));
    for (int8_t& v : a) v = (int8_t)(r.below(16) - 8);
    for (int64_t pitch : {ks / 2, ks}) {
        std::vector<uint8_t> out((size_t)(K / ks * M * pitch), 0x5a);
        t.at("pack_int4 pitch=%d", (int)pitch);
        t.expect(op_pack_int4({a.data(), nullptr, nullptr, M, K, 0, false}, ks, pitch, out.data()), "four bits hold -8 to 7");
        for (int64_t s = 0; s < K / ks; s++)
            for (int64_t m = 0; m < M; m++)
                for (int64_t i = 0; i < 2 * pitch; i++)
                    t.close(integer_of(Codec::i4, out[(size_t)((s * M + m) * pitch + i / 2)] >> (i % 2 ? 4 : 0) & 15), i < ks ? a[(size_t)(m * K + s * ks + i)] : 0, 0, "code", i);
    }
    for (int v : {8, -9, 127, -128}) {
        std::vector<int8_t> wide(64, 0);
        wide[37] = (int8_t)v;
        std::vector<uint8_t> out(32);
        t.expect(!op_pack_int4({wide.data(), nullptr, nullptr, 1, 64, 0, false}, 64, 32, out.data()), "four bits do not hold it");
    }
    const uint8_t codes[] = {0x12, 0xf9, 0x97, 0x11};
    t.expect(op_least_int4(codes, 4) == -7, "the least code");
}

}  // namespace
}  // namespace ork::test

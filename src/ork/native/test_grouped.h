// Products with 4-bit codes and with scales per group, and inflation. Part of test_kernels.
#pragma once
#include <algorithm>
#include "ops.h"
#include "test_reference.h"

namespace ork::test {
namespace {

inline int integer_of(Codec codec, int code) {
    static const int nf4[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
    return codec == Codec::nf4 ? nf4[code] : codec == Codec::i4 ? (code < 8 ? code : code - 16) : code;
}

// Weights of a quantised codec in their plain form, integers [n][K], and the same as a slice (docs/pack-format.md).
struct GroupedWeights {
    int64_t K, n, groups;
    std::vector<int8_t> plain;
    std::vector<float> scales;
    std::vector<uint16_t> group_plain, group_scales;   // [n][groups], [n/G][groups][G]
    std::vector<uint8_t> codes;
    Slice slice;

    GroupedWeights(Codec codec, int64_t K_, int64_t ks, int64_t n_, int64_t group, int32_t n0, Random& r) : K(K_), n(n_), groups(group ? K / group : 0) {
        const int64_t G = codec == Codec::i8 ? 32 : 64, bytes = codec == Codec::i8 ? 32 : 16;
        plain.assign((size_t)(n * K), 0);
        codes.assign((size_t)(n * K * bytes / 32), 0);
        scales = floats(r, n, 0.02f, 0.01f);
        group_plain.assign((size_t)(n * groups), 0);
        group_scales.assign((size_t)(n * groups), 0);
        for (int64_t c = 0; c < n; c++) {
            for (int64_t k = 0; k < K; k++) {
                const int code = codec == Codec::i8 ? (r.below(16) ? r.code(-128) : -128) : (int)r.below(16);
                plain[(size_t)(c * K + k)] = (int8_t)integer_of(codec, code);
                uint8_t* tile = &codes[(size_t)((k / ks * n * ks + c / G * G * ks + k % ks / 32 * G * 32 + c % G * 32) / 32 * bytes)];
                if (codec == Codec::i8) tile[k % 32] = (uint8_t)code;
                else tile[k % 32 / 2] |= (uint8_t)(code << (k % 2 ? 4 : 0));
            }
            for (int64_t g = 0; g < groups; g++) {
                const uint16_t h = r.below(20) ? (uint16_t)(0x3400 + r.below(0x0800)) : r.bits() & 1 ? 0 : (uint16_t)r.below(0x400);   // zero, subnormal
                group_plain[(size_t)(c * groups + g)] = group_scales[(size_t)((c / G * groups + g) * G + c % G)] = h;
            }
        }
        slice = {codec, codes.data(), scales.data(), group ? group_scales.data() : nullptr, K, ks, n0, (int32_t)n, group};
    }
};

void linear_grouped(const Kernels& k, Trace& t) {
    struct { Codec codec; int64_t K, ks, n, group, row_group; } shapes[] = {
        {Codec::i4, 32, 32, 64, 32, 32},      {Codec::nf4, 96, 96, 128, 32, 32},     {Codec::i4, 256, 256, 64, 64, 64},     {Codec::nf4, 1280, 640, 64, 128, 128},
        {Codec::i4, 1344, 672, 64, 96, 96},   {Codec::nf4, 1280, 1280, 64, 640, 640}, {Codec::i4, 64, 32, 128, 0, 0},        {Codec::nf4, 1152, 576, 128, 0, 0},
        {Codec::nf4, 8192, 4096, 64, 0, 0},   {Codec::i8, 256, 256, 128, 0, 32},     {Codec::i8, 640, 320, 64, 0, 128},      {Codec::i8, 512, 512, 64, 64, 64},
        {Codec::i4, 384, 192, 64, 0, 128},    {Codec::i8, 1152, 384, 64, 0, 576}};
    for (auto s : shapes)
        for (int full = 0; full < 2; full++)
            for (int64_t M : {1, 2, 3, 4, 5, 7, 8, 13, 20, 520}) {   // rows in place, panels of few rows and of many, two lots of rows
                if ((M > 8 && s.K > 4000) || (M > 20 && s.K > 64)) continue;
                Random r(s.K * 1000 + M * 2 + full + (int)s.codec * 77);
                GroupedWeights w(s.codec, s.K, s.ks, s.n, s.group, 64, r);
                const int64_t group = s.row_group ? s.row_group : s.K, groups = s.K / group, stride = 64 + s.n;
                std::vector<int8_t> a((size_t)(M * s.K));
                std::vector<int32_t> sums((size_t)(M * groups), 0);
                const std::vector<float> scales = floats(r, M * groups, 0.5f, 0.4f), bias = floats(r, stride, 0.0f, 9.0f);
                for (int64_t m = 0; m < M; m++)
                    for (int64_t i = 0; i < s.K; i++) sums[m * groups + i / group] += a[m * s.K + i] = m == 0 ? (full ? -128 : 127) : r.code(full ? -128 : -127);
                const Rows rows = {a.data(), scales.data(), sums.data(), M, s.K, s.row_group, full != 0};
                t.at("linear_grouped codec=%d M=%d K=%d ks=%d n=%d group=%d rows' group=%d full_range=%d", (int)s.codec, (int)M, (int)s.K, (int)s.ks, (int)s.n, (int)s.group, (int)s.row_group, full);

                std::vector<int32_t> acc((size_t)(M * groups * stride), 77);
                Matrix plain(M, stride, POISON), biased(M, stride, POISON);
                k.accumulate_grouped(rows, w.slice, 0, s.n / 64, acc.data(), stride);
                k.linear_grouped(rows, 0, M, w.slice, 0, s.n / 64, plain.mat(), nullptr);
                k.linear_grouped(rows, M / 2, M, w.slice, s.n / 64 - 1, s.n / 64, biased.mat(), bias.data());
                t.record(acc);
                t.record(plain.v);
                t.record(biased.v);
                for (int64_t m = 0; m < M; m++) {   // a row alone, and within the others
                    Matrix one(M, stride, POISON);
                    k.linear_grouped(rows, m, m + 1, w.slice, 0, s.n / 64, one.mat(), nullptr);
                    t.same(&one.at(m, 0), &plain.at(m, 0), (size_t)stride, "a row by itself");
                }
                if (!t.oracle) continue;
                for (int64_t m = 0; m < M; m++)
                    for (int64_t c = 0; c < s.n; c++) {
                        float y = 0;
                        for (int64_t g = 0; g < groups; g++) {
                            int64_t exact = 0;
                            for (int64_t i = g * group; i < (g + 1) * group; i++) exact += a[m * s.K + i] * w.plain[c * s.K + i];
                            t.close(acc[(m * groups + g) * stride + 64 + c], (double)exact, 0, "sum", (m * groups + g) * s.n + c);
                            const float row = scales[m * groups + g];   // as kernels.h specifies it, to the bit
                            if (!s.row_group) y = (float)exact * (row * w.scales[c]);
                            else y = std::fmaf((float)exact, s.group ? row * (float)half_value(w.group_plain[c * groups + g]) : row, y);
                        }
                        if (s.row_group) y = w.scales[c] * y;
                        t.close(plain.at(m, 64 + c), y, 0, "row", m * s.n + c);
                        t.close(biased.at(m, 64 + c), m >= M / 2 && c >= s.n - 64 ? y + bias[64 + c] : POISON, 0, "biased", m * s.n + c);
                    }
            }
}

void inflate(const Kernels& k, Trace& t) {
    for (Codec codec : {Codec::i4, Codec::nf4})
        for (int64_t tiles : {1, 3}) {
            Random r(tiles);
            std::vector<uint8_t> src((size_t)(tiles * 1024));
            for (auto& b : src) b = (uint8_t)r.bits();
            std::vector<int8_t> half[2] = {std::vector<int8_t>((size_t)(tiles * 1024)), std::vector<int8_t>((size_t)(tiles * 1024))};
            t.at("inflate codec=%d tiles=%d", (int)codec, (int)tiles);
            k.inflate(codec, src.data(), tiles, half[0].data(), half[1].data());
            t.record(half[0]);
            t.record(half[1]);
            for (int64_t i = 0; t.oracle && i < tiles * 64; i++)
                for (int64_t n = 0; n < 32; n++)
                    t.close(half[i % 64 / 32][i / 64 * 1024 + i % 32 * 32 + n], integer_of(codec, src[i * 16 + n / 2] >> n % 2 * 4 & 15), 0, "code", i * 32 + n);
        }
}

}  // namespace
}  // namespace ork::test

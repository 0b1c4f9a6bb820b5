// Tests of kernels_quant.inl: weights to codes, each the nearest under its stored scale, the scale no worse than absmax's.
#pragma once
#include <algorithm>
#include "test_reference.h"

namespace ork::test {

inline double level_of(Codec codec, int code) { return codec == Codec::nf4 ? NF4_LEVELS[code] : code; }

// Distance of x to the nearest level of a codec, in units of its scale.
inline double nearest(Codec codec, double x) {
    double best = INFINITY;
    const int top = codec == Codec::i8 ? 127 : 7;
    for (int c = codec == Codec::nf4 ? 0 : -top; c <= (codec == Codec::nf4 ? 15 : top); c++) best = std::min(best, std::fabs(x - level_of(codec, c)));
    return best;
}

inline void quantise_weights(const Kernels& k, Trace& t) {
    const float ratios[] = {0.9f, -1.0f, 0.7f, 1.1f, 0.6f};
    const int64_t n = 5;
    struct { int64_t K, group; } shapes[] = {{1, 0}, {15, 0}, {16, 0}, {33, 0}, {100, 0}, {64, 32}, {192, 64}, {256, 128}};
    for (auto s : shapes)
        for (Codec codec : {Codec::i8, Codec::i4, Codec::nf4})
            for (int search = 0; search < 3; search++) {
                Random r(s.K * 8 + (int)codec * 4 + search);
                const int64_t K = s.K, Kp = (K + 31) / 32 * 32, count = s.group ? K / s.group : 0;
                std::vector<float> rows = floats(r, n * K, 0.0f, 3.0f), weight = floats(r, (K + 15) / 16 * 16, 1.0f, 1.0f);
                for (float& w : weight) w = std::fabs(w);
                for (int64_t i = K; i < (int64_t)weight.size(); i++) weight[i] = 0.0f;
                for (int64_t i = 0; i < K; i++) { rows[i] *= 1e-28f; rows[K + i] *= 1e30f; rows[2 * K + i] = 0.0f; rows[3 * K + i] *= 1e-32f; }
                rows[4 * K + K / 2] = 50.0f;
                const QuantWeights q = {codec, K, Kp, s.group, search == 2 ? weight.data() : nullptr, ratios, search ? 5 : 0, 2, codec == Codec::i4 ? 14 : 18};
                std::vector<int8_t> codes((size_t)(n * Kp), 99);
                std::vector<float> channel((size_t)n, POISON);
                std::vector<uint16_t> groups((size_t)(n * count), 0x7c01);
                t.at("quantise_weights K=%d group=%d codec=%d search=%d", (int)K, (int)s.group, (int)codec, search);
                const int64_t bad = k.quantise_weights(q, rows.data(), n, codes.data(), channel.data(), groups.data());
                t.expect(bad == -1, "every row is finite");
                t.record(codes.data(), n * Kp);
                t.record(channel.data(), n);
                for (uint16_t g : groups) { const int32_t word = g; t.record(&word, 1); }
                for (int64_t i = 0; i < n; i++) {
                    double error = 0, size = 0;
                    for (int64_t j = 0; j < K; j++) {
                        const double scale = s.group ? half_value(groups[i * count + j / s.group]) * channel[i] : channel[i];
                        const double x = rows[i * K + j], v = level_of(codec, codes[i * Kp + j]) * scale;
                        if (scale != 0) t.expect(std::fabs(x - v) <= std::fabs(scale) * (nearest(codec, x / scale) + 1e-4), "the nearest level");
                        error += (x - v) * (x - v);
                        size += x * x;
                    }
                    t.expect(i != 2 || error == 0, "a row of zeros stays one");
                    t.expect(i != 3 || error == size, "a row of nothing from 2^-100 on becomes zero");
                    if (i < 2) t.expect(error <= (codec == Codec::i8 ? 1e-3 : 0.1) * size, "close to the row");
                    for (int64_t j = K; j < Kp; j++) t.expect(codes[i * Kp + j] == 0, "padding is zero");
                }
                rows[3 * K] = search ? INFINITY : NAN;
                t.expect(k.quantise_weights(q, rows.data(), n, codes.data(), channel.data(), groups.data()) == 3, "the row that is not finite");
            }
}

}  // namespace ork::test

// What test_kernels.cpp stands on: a seeded generator, weights tiled from their plain form, a record of every output word,
// and plain definitions in double precision. No code here is shared with the kernels.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>
#include "kernels.h"

namespace ork::test {

inline constexpr float POISON = -7.25f;    // what outputs hold before a kernel writes them; words it must not touch stay so
inline constexpr float EXTREMES[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-45f, -3e-39f, 1.2e-38f, 88.5f, -88.5f, 3.4e38f, -3.4e38f, 65504.0f, 65519.9f, 65520.0f, 6e-8f};

// Inputs come from integers and exact float operations alone, so that every machine draws the same ones.
class Random {
  public:
    explicit Random(uint64_t seed) : s_(seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du) {}
    uint32_t bits() {
        s_ ^= s_ << 13;
        s_ ^= s_ >> 7;
        s_ ^= s_ << 17;
        return (uint32_t)(s_ >> 32);
    }
    int64_t below(int64_t n) { return bits() % n; }
    float uniform() { return (float)((int32_t)bits() >> 8) * 0x1p-23f; }              // [-1, 1)
    float bell() { float s = uniform(); s += uniform(); return s + uniform(); }       // variance 1; drawn in this order
    int8_t code(int low) { return (int8_t)(low + below(128 - low)); }                 // [low, 127]
    float wild() { uint32_t b = bits(); float f; std::memcpy(&f, &b, 4); return f; }  // any pattern: NaNs, infinities, subnormals

  private:
    uint64_t s_;
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// f32 rows as the kernels take them, on the heap with not a float to spare: the address sanitizer sees every overrun.
struct Matrix {
    int64_t rows, cols, stride;
    std::vector<float> v;
    Matrix(int64_t r, int64_t c, float fill = 0.0f) : rows(r), cols(c), stride(round_up(c, 64)), v((size_t)(r * stride), fill) {}
    Matrix(int64_t r, int64_t c, Random& random, float size = 1.0f) : Matrix(r, c) {
        for (int64_t m = 0; m < r; m++) for (int64_t k = 0; k < c; k++) at(m, k) = random.bell() * size;
    }
    float& at(int64_t m, int64_t k) { return v[(size_t)(m * stride + k)]; }
    Mat mat() { return {v.data(), rows, cols, stride}; }
    Mat row(int64_t m) { return {v.data() + m * stride, 1, cols, stride}; }
};

inline std::vector<float> floats(Random& r, int64_t n, float centre, float spread) {
    std::vector<float> v((size_t)n);
    for (float& x : v) x = centre + spread * r.uniform();
    return v;
}

inline std::vector<float> signs(Random& r, int64_t n) {
    std::vector<float> v((size_t)n);
    for (float& x : v) x = r.bits() & 1 ? 1.0f : -1.0f;
    return v;
}

inline double half_value(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const double size = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
    return h & 0x8000 ? -size : size;
}

// Weights in their plain form [n][K], and the same as a slice (docs/pack-format.md).
struct Weights {
    int64_t K, Kp, ks, n, group;
    std::vector<int8_t> plain_i8;       // codes, of nf4 the levels; of padding too
    std::vector<float> plain_f32, scales;
    std::vector<uint16_t> plain_groups, group_scales;   // [n][Kp/group], and as stored
    std::vector<uint8_t> codes;
    Slice slice;

    Weights(Codec codec, int64_t K_, int64_t ks_, int64_t n_, int32_t n0, Random& r, int64_t group_ = 0) : K(K_), Kp(round_up(K_, ks_)), ks(ks_), n(n_), group(group_) {
        const bool quantised = is_quantised(codec), nibbles = codec == Codec::i4 || codec == Codec::nf4;
        const int64_t G = codec == Codec::i8 ? 32 : nibbles ? 64 : 16;
        codes.assign((size_t)(n * Kp * (codec == Codec::f32 ? 8 : codec == Codec::f16 ? 4 : codec == Codec::i8 ? 2 : 1) / 2), 0);
        if (quantised) { plain_i8.assign((size_t)(n * Kp), codec == Codec::nf4 ? -127 : 0); scales = floats(r, n, 0.02f, 0.01f); }
        else plain_f32.assign((size_t)(n * Kp), 0.0f);
        for (int64_t c = 0; c < n; c++)
            for (int64_t k = 0; k < K; k++) {
                const int64_t inner = k % ks, at = c * Kp + k;
                const size_t code = (size_t)(k / ks * n * ks + c / G * G * ks + inner / 32 * 32 * G + c % G * 32 + inner % 32);
                if (codec == Codec::i8) {
                    plain_i8[(size_t)at] = r.below(16) ? r.code(-128) : r.bits() & 1 ? -128 : 127;
                    codes[code] = (uint8_t)plain_i8[(size_t)at];
                } else if (nibbles) {
                    constexpr int levels[] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
                    const int v = (int)r.below(16);
                    plain_i8[(size_t)at] = (int8_t)(codec == Codec::nf4 ? levels[v] : v < 8 ? v : v - 16);
                    codes[code / 2] = (uint8_t)(codes[code / 2] | v << (code % 2 ? 4 : 0));
                } else if (codec == Codec::f16) {
                    uint16_t v = (uint16_t)r.bits();
                    v = (uint16_t)(r.below(8) ? (v & 0x83ff) | (10 + r.below(8)) << 10 : v & 0x83ff);   // 2^-5 to 2^3, or subnormal
                    plain_f32[(size_t)at] = (float)half_value(v);
                    std::memcpy(&codes[2 * code], &v, 2);
                } else {
                    plain_f32[(size_t)at] = r.bell();
                    std::memcpy(&codes[(size_t)(4 * (c / 16 * 16 * Kp + k * 16 + c % 16))], &plain_f32[(size_t)at], 4);
                }
            }
        if (group) {
            const int64_t count = Kp / group;
            plain_groups.resize((size_t)(n * count));
            group_scales.resize((size_t)(n * count));
            for (int64_t c = 0; c < n; c++)
                for (int64_t g = 0; g < count; g++) {
                    const uint16_t v = (uint16_t)(r.below(16) ? 0x2000 + r.below(0x1c00) : r.below(0x400));   // 2^-7 to 1, or subnormal
                    plain_groups[(size_t)(c * count + g)] = group_scales[(size_t)(c / G * G * count + g * G + c % G)] = v;
                }
        }
        slice = {codec, codes.data(), scales.data(), group ? group_scales.data() : nullptr, Kp, ks, n0, (int32_t)n, group};
    }
    float group_scale(int64_t c, int64_t g) const { return (float)half_value(plain_groups[(size_t)(c * (Kp / group) + g)]); }
    double weight(int64_t c, int64_t k) const {
        if (!plain_f32.empty()) return plain_f32[(size_t)(c * Kp + k)];
        return plain_i8[(size_t)(c * Kp + k)] * (double)scales[(size_t)c] * (group ? group_scale(c, k / group) : 1.0f);
    }
};

// Every word that a kernel produced, padding included, under labels that say which case it belongs to.
// A NaN is recorded as one NaN: processors differ in the sign and payload of the NaNs they make.
class Trace {
  public:
    explicit Trace(bool with_oracle) : oracle(with_oracle) {}
    const bool oracle;      // also compare with the definitions: once is enough, for the paths must equal each other
    std::vector<uint32_t> words;
    std::string failure;    // the first one

    __attribute__((format(printf, 2, 3))) void at(const char* format, ...) {
        char text[256];
        va_list args;
        va_start(args, format);
        std::vsnprintf(text, sizeof text, format, args);
        va_end(args);
        marks_.push_back({words.size(), text});
    }
    void record(const float* p, size_t n) { for (size_t i = 0; i < n; i++) words.push_back(word(p[i])); }
    void record(const uint16_t* p, size_t n) { for (size_t i = 0; i < n; i++) words.push_back((p[i] & 0x7fff) > 0x7c00 ? 0x7e00 : p[i]); }
    void record(const int32_t* p, size_t n) { words.insert(words.end(), p, p + n); }
    void record(const int8_t* p, size_t n) { for (size_t i = 0; i < n; i++) words.push_back((uint32_t)(int32_t)p[i]); }
    template <class T> void record(const std::vector<T>& v) { record(v.data(), v.size()); }

    // The two must be the same number or both not a number, or differ by no more than the tolerance.
    void close(double got, double want, double tolerance, const char* what, int64_t index) {
        if (got == want || (std::isnan(got) && std::isnan(want)) || std::fabs(got - want) <= tolerance) return;
        fail("%s[%lld] is %.9g, the definition gives %.9g, tolerance %.3g", what, (long long)index, got, want, tolerance);
    }
    void same(const float* got, const float* want, size_t n, const char* what) {
        for (size_t i = 0; i < n; i++)
            if (word(got[i]) != word(want[i])) return fail("%s: element %zu is %.9g, not %.9g", what, i, (double)got[i], (double)want[i]);
    }
    void expect(bool holds, const char* what) { if (!holds) fail("%s", what); }

    __attribute__((format(printf, 2, 3))) void fail(const char* format, ...) {
        if (!failure.empty()) return;
        char text[256];
        va_list args;
        va_start(args, format);
        std::vsnprintf(text, sizeof text, format, args);
        va_end(args);
        failure = (marks_.empty() ? "" : marks_.back().second + ": ") + text;
    }
    void must_equal(const Trace& other) {
        if (!failure.empty()) return;
        size_t i = 0;
        while (i < words.size() && i < other.words.size() && words[i] == other.words[i]) i++;
        if (i == words.size() && i == other.words.size()) return;
        size_t m = 0;
        while (m + 1 < marks_.size() && marks_[m + 1].first <= i) m++;
        const uint32_t a = i < words.size() ? words[i] : 0, b = i < other.words.size() ? other.words[i] : 0;
        float fa, fb;
        std::memcpy(&fa, &a, 4);
        std::memcpy(&fb, &b, 4);
        char text[256];
        std::snprintf(text, sizeof text, "%s: word %zu is %08x (%.9g), portable gives %08x (%.9g)", marks_[m].second.c_str(), i - marks_[m].first, a, (double)fa, b, (double)fb);
        failure = text;
    }
    uint64_t digest() const {   // FNV-1a of the words' bytes, lowest first
        uint64_t h = 0xcbf29ce484222325u;
        for (uint32_t w : words) for (int b = 0; b < 4; b++) h = (h ^ (w >> 8 * b & 255)) * 0x100000001b3u;
        return h;
    }

  private:
    static uint32_t word(float f) { uint32_t b; std::memcpy(&b, &f, 4); return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : b; }
    std::vector<std::pair<size_t, std::string>> marks_;
};

// --- definitions ------------------------------------------------------------------------------------------------------------

inline double nearest_half(float f) {   // half to even, as nearbyint rounds
    const double a = std::fabs((double)f);
    if (std::isnan(f)) return NAN;
    if (a >= 65520.0) return std::copysign(INFINITY, f);   // what rounds past 65504 overflows
    int e;
    std::frexp(a, &e);
    const int last = (e - 1 < -14 ? -14 : e - 1) - 10;
    return std::copysign(std::ldexp(std::nearbyint(std::ldexp(a, -last)), last), f);
}

// Element i of H x / sqrt(block): H[i][j] = (-1)^(bits that i and j share).
inline double hadamard_at(const double* x, int64_t block, int64_t i) {
    double s = 0;
    for (int64_t j = 0; j < block; j++) s += __builtin_parityll((unsigned long long)(i & j)) ? -x[j] : x[j];
    return s / std::sqrt((double)block);
}

inline double silu(double x) { return x / (1 + std::exp(-x)); }
inline double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))); }

}  // namespace ork::test

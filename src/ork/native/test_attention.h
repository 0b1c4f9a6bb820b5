// The KV cache, halves, and attention against double precision. Part of test_kernels.
#pragma once
#include <algorithm>
#include "test_reference.h"

namespace ork::test {
namespace {

// A cache full of NaN, as recycled blocks may be: nothing of it may reach a result.
struct Cache {
    std::vector<uint16_t> keys16, values16;
    std::vector<float> keys32, values32;
    KvLayer kv;
    Cache(int64_t blocks, int64_t heads, int64_t dim, bool half) {
        const int64_t pad = round_up(dim, 16), k = blocks * heads * dim * KV_BLOCK, v = blocks * heads * pad * KV_BLOCK;
        if (half) { keys16.assign(k, 0x7e00); values16.assign(v, 0x7e00); } else { keys32.assign(k, NAN); values32.assign(v, NAN); }
        kv = {half ? (void*)keys16.data() : keys32.data(), half ? (void*)values16.data() : values32.data(), half, heads, dim, pad};
    }
    double key(int64_t slot, int64_t h, int64_t d) const { return get(keys16, keys32, ((slot / KV_BLOCK * kv.heads + h) * kv.dim + d) * KV_BLOCK + slot % KV_BLOCK); }
    double value(int64_t slot, int64_t h, int64_t d) const { return get(values16, values32, ((slot / KV_BLOCK * kv.heads + h) * KV_BLOCK + slot % KV_BLOCK) * kv.dim_pad + d); }
    void record(Trace& t) const { t.record(keys16); t.record(keys32); t.record(values16); t.record(values32); }

  private:
    double get(const std::vector<uint16_t>& h, const std::vector<float>& f, int64_t i) const { return kv.half ? half_value(h[i]) : f[i]; }
};

void kv_append(const Kernels& k, Trace& t) {
    for (int64_t dim : {8, 20, 64, 128, 256})
        for (bool half : {true, false}) {
            Random r(dim * 2 + half);
            const int64_t heads = 3;
            const std::vector<int32_t> slots = {3, 255, 256, 257, 300, 304, 511, 512, 0};
            Matrix key((int64_t)slots.size(), heads * dim, r), value = key;
            for (float& x : value.v) x = -2 * x;
            for (int64_t m = 0; m < 8; m++) {
                const int64_t c = r.below(3 * dim);
                key.at(m, c) = EXTREMES[2 * m];
                value.at(m, c) = EXTREMES[2 * m + 1];
            }
            Cache c(3, heads, dim, half);
            t.at("kv_append dim=%d half=%d", (int)dim, half);
            k.kv_append(c.kv, key.mat(), value.mat(), slots.data(), 1, heads);
            c.record(t);
            for (int64_t m = 0; t.oracle && m < 9; m++)
                for (int64_t h = 0; h < heads; h++)
                    for (int64_t d = 0; d < dim; d++) {
                        auto stored = [&](float f) { return h == 0 ? NAN : half ? nearest_half(f) : (double)f; };
                        t.close(c.key(slots[m], h, d), stored(key.at(m, h * dim + d)), 0, "key", m * 1000 + d);
                        t.close(c.value(slots[m], h, d), stored(value.at(m, h * dim + d)), 0, "value", m * 1000 + d);
                    }
        }
}

void attend(const Kernels& k, const AttentionArgs& a, const Tile& tile) {
    const int64_t vectors = tile.count * (a.heads / a.kv.heads);
    const int64_t lowest = a.window > 0 ? std::max<int64_t>(0, tile.first_position - a.window + 1) : 0;
    std::vector<float> scratch((size_t)k.attention_scratch(a, tile.count), NAN), max[2], sum[2], out[2];
    for (int i = 0; i < 2; i++) { max[i].assign(vectors, NAN); sum[i].assign(vectors, NAN); out[i].assign(vectors * a.kv.dim_pad, NAN); }
    const Partial total = {max[0].data(), sum[0].data(), out[0].data()}, one = {max[1].data(), sum[1].data(), out[1].data()};
    for (int64_t h = 0; h < a.kv.heads; h++) {
        for (int64_t b = lowest / KV_BLOCK; b <= (tile.first_position + tile.count - 1) / KV_BLOCK; b++) {
            const bool first = b == lowest / KV_BLOCK;
            k.attention_block(a, tile, h, b, scratch.data(), first ? total : one);
            if (!first) k.attention_merge(a, tile, total, one);
        }
        k.attention_finish(a, tile, h, total);
    }
}

void attention(const Kernels& k, Trace& t) {
    struct { int64_t length, rows, heads, kv_heads, dim, window; float softcap; bool half; } cases[] = {
        {1, 1, 1, 1, 64, 0, 0, true},        {2, 2, 4, 2, 20, 0, 0, false},    {17, 17, 3, 1, 64, 0, 0, true},     {40, 5, 4, 4, 8, 7, 0, true},
        {255, 3, 4, 1, 64, 0, 0, true},      {256, 4, 2, 2, 128, 0, 50, true}, {257, 3, 9, 3, 64, 0, 0, true},     {257, 2, 4, 1, 256, 0, 0, false},
        {300, 13, 2, 1, 20, 1, 0, true},     {300, 8, 3, 1, 64, 16, 30, true}, {530, 24, 1, 1, 64, 100, 0, false}, {600, 7, 4, 2, 64, 256, 0, true},
        {600, 9, 2, 1, 128, 257, 50, false}, {780, 2, 4, 2, 64, 512, 0, true}, {700, 1, 8, 2, 64, 0, 0, true},
    };
    for (auto c : cases) {
        Random r(c.length * 10 + c.rows);
        const int64_t blocks = (c.length + 255) / 256, first = c.length - c.rows, share = c.heads / c.kv_heads;
        std::vector<int32_t> table((size_t)(2 * blocks + 2), -1), slots;    // sequence 1 of two, its blocks in descending order
        for (int64_t b = 0; b < blocks; b++) table[blocks + 1 + b] = (int32_t)(blocks - b);
        for (int64_t p = 0; p < c.length; p++) slots.push_back((int32_t)(table[blocks + 1 + p / 256] * 256 + p % 256));
        Matrix key(c.length, c.kv_heads * c.dim, r), value(c.length, c.kv_heads * c.dim, r), q(c.rows + 1, c.heads * c.dim, r), out(c.rows + 1, c.heads * c.dim, POISON);
        if (c.rows > 4) { q.at(2, 3) = INFINITY; q.at(3, 5) = NAN; for (int64_t d = 0; d < c.dim; d++) q.at(4, d) *= 1e3f; }
        if (c.rows > 4) value.at(first + 4, 1) = INFINITY;   // spoils who sees it, and no row before it or past its window
        Cache cache(blocks + 1, c.kv_heads, c.dim, c.half);
        k.kv_append(cache.kv, key.mat(), value.mat(), slots.data(), 0, c.kv_heads);
        const Tile tile = {1, (int32_t)c.rows, 1, (int32_t)first};
        AttentionArgs a = {q.mat(), out.mat(), cache.kv, &tile, table.data(), blocks + 1, c.heads, c.window, 0.125f, c.softcap};
        t.at("attention length=%d rows=%d heads=%d/%d dim=%d window=%d softcap=%g half=%d", (int)c.length, (int)c.rows, (int)c.heads, (int)c.kv_heads, (int)c.dim, (int)c.window, (double)c.softcap, c.half);
        attend(k, a, tile);
        t.record(out.v);
        Matrix alone(c.rows + 1, c.heads * c.dim, POISON);   // a row's result depends on that row alone
        a.out = alone.mat();
        for (int32_t m = 0; m < c.rows; m++) attend(k, a, {1 + m, 1, 1, (int32_t)first + m});
        t.same(alone.v.data(), out.v.data(), out.v.size(), "rows one by one");
        if (!t.oracle) continue;
        for (int64_t m = 0; m < c.rows; m++)
            for (int64_t h = 0; h < c.heads; h++) {
                const int64_t p = first + m, from = c.window > 0 ? std::max<int64_t>(0, p - c.window + 1) : 0;
                std::vector<double> s, y((size_t)c.dim, 0.0);
                for (int64_t i = from; i <= p; i++) {
                    double dot = 0;
                    for (int64_t d = 0; d < c.dim; d++) dot += q.at(1 + m, h * c.dim + d) * cache.key(slots[i], h / share, d);
                    s.push_back(c.softcap > 0 ? c.softcap * std::tanh(dot * 0.125 / c.softcap) : dot * 0.125);
                }
                if ((m == 1 || m == 2) && c.rows > 4 && h == 0) {   // the special rows, where a query holds an infinity or a NaN
                    for (int64_t d = 0; m == 2 && d < c.dim; d++) t.close(out.at(1 + m, d), NAN, 0, "a NaN query", d);
                    continue;
                }
                const double top = *std::max_element(s.begin(), s.end());
                double sum = 0, size = 0;
                for (double& x : s) { size = std::max(size, std::fabs(x)); x = std::exp(x - top); sum += x; }
                for (int64_t i = from; i <= p; i++) for (int64_t d = 0; d < c.dim; d++) y[d] += s[i - from] / sum * cache.value(slots[i], h / share, d);
                for (int64_t d = 0; d < c.dim; d++) t.close(out.at(1 + m, h * c.dim + d), y[d], 4e-6 + 2e-6 * size, "row", m * 1000 + h * c.dim + d);
            }
    }
}

// Every half through the cache and back: written as a float, read as the only position that a query sees.
void halves(const Kernels& k, Trace& t) {
    const int64_t dim = 256, count = 65536 / dim;
    Cache c(count, 1, dim, true);
    Matrix key(count, dim), value(count, dim), q(1, dim), out(count, dim, POISON), wild(count, dim);
    Random r(7);
    std::vector<int32_t> slots;
    for (int64_t b = 0; b < count; b++) {
        slots.push_back((int32_t)(b * 256));
        for (int64_t d = 0; d < dim; d++) {
            value.at(b, d) = (float)half_value((uint16_t)(b * 256 + d));
            const float near = value.at(b, d) * (1.0f + r.uniform() * 0x1p-11f);   // beside it, between it and its neighbours, anywhere
            wild.at(b, d) = d % 4 == 0 ? r.wild() : d % 4 == 1 ? (float)((half_value((uint16_t)(b * 256 + d)) + half_value((uint16_t)(b * 256 + d + 1))) / 2) : near;
        }
    }
    t.at("halves");
    k.kv_append(c.kv, key.mat(), value.mat(), slots.data(), 0, 1);
    for (int32_t b = 0; b < count; b++) attend(k, {q.mat(), out.row(b), c.kv, nullptr, &b, 1, 1, 0, 1.0f, 0.0f}, {0, 1, 0, 0});
    t.record(out.v);
    for (int64_t i = 0; t.oracle && i < 65536; i++) {
        const uint16_t h = c.values16[i / 256 * 256 * 256 + i % 256];
        t.expect(std::isnan(half_value((uint16_t)i)) ? std::isnan(half_value(h)) : h == i, "a half as a float is that half again");
        t.close(out.v[i], half_value((uint16_t)i), 0, "half read", i);
    }
    k.kv_append(c.kv, key.mat(), wild.mat(), slots.data(), 0, 1);
    c.record(t);
    for (int64_t i = 0; t.oracle && i < 65536; i++) t.close(c.value(slots[i / 256], 0, i % 256), nearest_half(wild.v[i]), 0, "half written", i);
}

}  // namespace
}  // namespace ork::test

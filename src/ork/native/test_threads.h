// Operations over threads, chunks and a pool that changes under them. Part of test_kernels.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include "ops.h"
#include "pool.h"
#include "test_reference.h"

namespace ork::test {
namespace {

std::vector<float> forward(int64_t chunk, bool decode) {   // attention over a prompt, in chunks, then perhaps a position at a time
    const int64_t length = decode ? 606 : 270, heads = 4, kv_heads = 2, dim = 32;
    Random r(1);
    Matrix q(length, heads * dim, r), key(length, kv_heads * dim, r), value(length, kv_heads * dim, r), out(length, heads * dim, POISON);
    KvCache cache(1, kv_heads, dim, 4, true);
    Batch b;
    b.table = {3, 1, 0};
    b.table_stride = 3;
    for (int64_t p = 0; p < length; p += chunk) {
        if (decode && p + chunk > 600) chunk = 1;
        const int64_t n = std::min(chunk, length - p);
        b.runs = {{0, (int32_t)n, 0, (int32_t)p}};
        b.slots.clear();
        for (int64_t i = p; i < p + n; i++) b.slots.push_back((int32_t)(b.table[i / 256] * 256 + i % 256));
        auto part = [&](Matrix& m) { return Mat{&m.at(p, 0), n, m.cols, m.stride}; };
        op_attention(cache.layer(0), b, part(q), part(key), part(value), heads, 0.125f, 0, 0.0f, part(out));
    }
    return out.v;
}

void ops(const Kernels& k, Trace& t) {
    choose_kernels(k.name);
    std::vector<float> first;
    for (int threads : {1, 2, 4}) {
        pool_resize(threads);
        std::vector<float> all;
        auto keep = [&](const std::vector<float>& v) { all.insert(all.end(), v.begin(), v.end()); };
        Random r(5);
        for (int64_t M : {1, 3, 17}) {
            Weights a(Codec::i8, 576, 576, 192, 0, r), b(Codec::i8, 576, 576, 64, 192, r), f(Codec::f32, 576, 32, 128, 0, r);
            Matrix x(M, 576, r), y(M, 256, POISON), z(M, 128, POISON), normed(M, 576, POISON);
            const std::vector<float> sign = signs(r, 576), weight = floats(r, 576, 1.0f, 0.2f);
            QuantisedRows rows(M, 576);
            op_rms_norm(x.mat(), weight.data(), 1e-6f, normed.mat());
            op_quantise(normed.mat(), {sign.data(), 64}, 127, rows);
            const Rows view = rows.view();
            op_linear(normed.mat(), &view, {{a.slice, y.mat(), nullptr}, {b.slice, y.mat(), nullptr}});
            op_linear(normed.mat(), nullptr, {{f.slice, z.mat(), nullptr}});
            keep(y.v);
            keep(z.v);
        }
        const std::vector<float> whole = forward(270, false);
        keep(whole);
        for (int64_t chunk : {1, 43, 256}) { const std::vector<float> parts = forward(chunk, false); t.same(parts.data(), whole.data(), whole.size(), "attention in chunks"); }
        keep(forward(600, true));
        t.at("ops threads=%d", threads);
        if (first.empty()) { first = all; t.record(all); }
        t.same(all.data(), first.data(), all.size(), "one thread or several");
    }
    pool_resize(1);
}

void pool(Trace& t) {
    t.at("pool");
    for (int threads : {1, 2, 4, 3}) {
        pool_resize(threads);
        t.expect(pool_threads() == threads, "as many threads as asked for");
        for (int64_t count : {0, 1, 2, 3, 7, 64, 1000})
            for (int64_t grain : {0, 1, 3, 64, 5000}) {
                std::vector<std::atomic<int>> seen((size_t)count);
                std::atomic<bool> worker_ok{true};
                auto task = [&](int64_t b, int64_t e, int w) { if (w < 0 || w >= threads) worker_ok = false; for (int64_t i = b; i < e; i++) seen[i]++; };
                if (grain) parallel_chunks(count, grain, task); else parallel_runs(count, task);
                t.expect(std::all_of(seen.begin(), seen.end(), [](const std::atomic<int>& n) { return n == 1; }) && worker_ok, "each index once, by a worker of the pool");
            }
    }
    // Two users and one who keeps changing the number of threads: no result changes, nothing hangs.
    const std::vector<float> want = forward(43, false);
    std::atomic<bool> stop{false};
    std::thread changer([&] { for (int i = 0; !stop; i++) { pool_resize(1 + i % 4); std::this_thread::sleep_for(std::chrono::milliseconds(2)); } });
    std::vector<float> other;
    std::thread user([&] { for (int i = 0; i < 4; i++) other = forward(43, false); });
    for (int i = 0; i < 4; i++) { const std::vector<float> got = forward(43, false); t.same(got.data(), want.data(), want.size(), "while the pool changes"); }
    user.join();
    stop = true;
    changer.join();
    t.same(other.data(), want.data(), want.size(), "another user while the pool changes");
    pool_resize(1);
}

}  // namespace
}  // namespace ork::test

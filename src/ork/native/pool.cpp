#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ork {
namespace {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// About 50 us of spinning: decode posts a job every few microseconds, a waiting user none for seconds.
constexpr int SPINS = 2000;

struct Job {
    const RangeTask* task = nullptr;
    int64_t count = 0, grain = 0;   // grain 0: contiguous runs
    int workers = 1;
};

class Pool {
  public:
    explicit Pool(int threads) : size_(threads) {
        for (int w = 1; w < threads; w++) threads_.emplace_back([this, w] { loop(w); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            epoch_.fetch_add(1);
        }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }
    int size() const { return size_; }

    void run(const Job& job) {
        std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
        job_ = job;
        next_.store(0, std::memory_order_relaxed);
        pending_.store(size_ - 1, std::memory_order_relaxed);
        epoch_.fetch_add(1);            // seq_cst: ordered before the sleepers_ read below
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(0);
        while (pending_.load(std::memory_order_acquire) > 0) relax();
    }

  private:
    void work(int w) {
        const Job& j = job_;
        if (j.grain == 0) {
            const int64_t b = j.count * w / size_, e = j.count * (w + 1) / size_;
            if (b < e) (*j.task)(b, e, w);
            return;
        }
        for (;;) {
            const int64_t b = next_.fetch_add(j.grain, std::memory_order_relaxed);
            if (b >= j.count) return;
            (*j.task)(b, b + j.grain < j.count ? b + j.grain : j.count, w);
        }
    }
    void loop(int w) {
        uint32_t seen = 0;
        for (;;) {
            int spins = 0;
            while (epoch_.load(std::memory_order_acquire) == seen) {
                if (++spins < SPINS) { relax(); continue; }
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return epoch_.load() != seen; });
                sleepers_.fetch_sub(1);
            }
            seen++;
            if (stop_) return;
            work(w);
            pending_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::mutex run_mutex_, mutex_;
    std::condition_variable wake_;
    Job job_;
    std::atomic<int64_t> next_{0};
    std::atomic<int> pending_{0}, sleepers_{0};
    std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
};

std::mutex pool_mutex;
Pool* pool = nullptr;   // leaked at exit on purpose: joining threads in static destruction can hang an interpreter

Pool& the_pool() {
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (!pool) pool = new Pool(1);
    return *pool;
}

}  // namespace

int pool_threads() { return the_pool().size(); }

void pool_resize(int threads) {
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (pool && pool->size() == threads) return;
    delete pool;
    pool = new Pool(threads < 1 ? 1 : threads);
}

void parallel_runs(int64_t count, RangeTask task) {
    Pool& p = the_pool();
    if (p.size() == 1 || count <= 1) { if (count > 0) task(0, count, 0); return; }
    p.run(Job{&task, count, 0, p.size()});
}

void parallel_chunks(int64_t count, int64_t grain, RangeTask task) {
    Pool& p = the_pool();
    if (p.size() == 1 || count <= grain) { if (count > 0) task(0, count, 0); return; }
    p.run(Job{&task, count, grain, p.size()});
}

}  // namespace ork

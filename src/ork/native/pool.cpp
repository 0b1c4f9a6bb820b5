#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
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

// Some 150 us of spinning: decode posts a job every few to a hundred microseconds, a waiting user none for seconds. The caller waits for
// its workers by spinning too, and past that long offers its core to them: there may be more threads than cores.
constexpr int SPINS = 16000;

// A worker's share of a job: [begin, end) of its units, and the job's tag, in one word that owner and thieves change by CAS.
// The owner takes from the front, thieves from the back, so that each walks its own stretch of memory to the end.
constexpr int BITS = 22;
constexpr int64_t MOST_UNITS = (int64_t(1) << BITS) - 1;
constexpr uint64_t FIELD = (uint64_t(1) << BITS) - 1;
struct alignas(64) Share { std::atomic<uint64_t> word{0}; };

uint64_t pack(uint64_t tag, int64_t begin, int64_t end) { return tag << 2 * BITS | uint64_t(begin) << BITS | uint64_t(end); }

class Pool {
  public:
    explicit Pool(int threads) : size_(threads), shares_(new Share[threads]) {
        for (int w = 1; w < threads; w++) threads_.emplace_back([this, w] { loop(w); });
    }
    ~Pool() {
        stop_ = true;
        epoch_.fetch_add(1);
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }
    int size() const { return size_; }

    // Returns when every unit is done. A worker that the system has not scheduled meanwhile is not waited for: others have
    // done its share, and the tag keeps it from touching a later job with an earlier job's task.
    void run(int64_t count, int64_t grain, int workers, const RangeTask& task) {
        std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
        const uint32_t epoch = epoch_.load() + 1;
        task_.store(&task, std::memory_order_relaxed);
        grain_.store(grain, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        workers_.store(workers, std::memory_order_relaxed);
        for (int w = 0; w < size_; w++)   // beyond `workers` a share is empty
            shares_[w].word.store(w < workers ? pack(tag_of(epoch), count * w / workers, count * (w + 1) / workers) : pack(tag_of(epoch), 0, 0), std::memory_order_release);
        epoch_.store(epoch);            // seq_cst: ordered before the sleepers_ read below
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(0, epoch);
        for (int spins = 0; done_.load(std::memory_order_acquire) != count; spins++)
            spins < SPINS ? relax() : std::this_thread::yield();
    }

  private:
    static uint64_t tag_of(uint32_t epoch) { return epoch & ((1u << (64 - 2 * BITS)) - 1); }

    void work(int w, uint32_t epoch) {
        const RangeTask* task = task_.load(std::memory_order_relaxed);   // used only once a claim has shown that the job is alive
        const int64_t grain = grain_.load(std::memory_order_relaxed);
        const int workers = workers_.load(std::memory_order_relaxed);
        if (w >= workers) return;
        int64_t b, e;
        while (claim(shares_[w], epoch, grain, true, &b, &e)) finish(*task, b, e, w);
        for (int other = 1; other < workers; other++)
            while (claim(shares_[(w + other) % workers], epoch, grain, false, &b, &e)) finish(*task, b, e, w);
    }
    void finish(const RangeTask& task, int64_t b, int64_t e, int w) {
        task(b, e, w);
        done_.fetch_add(e - b, std::memory_order_release);
    }
    static bool claim(Share& share, uint32_t epoch, int64_t grain, bool front, int64_t* b, int64_t* e) {
        uint64_t word = share.word.load(std::memory_order_acquire);
        for (;;) {
            const int64_t begin = word >> BITS & FIELD, end = word & FIELD;
            if (word >> 2 * BITS != tag_of(epoch) || begin >= end) return false;
            const int64_t part = end - begin < grain ? end - begin : grain;
            const uint64_t rest = front ? pack(tag_of(epoch), begin + part, end) : pack(tag_of(epoch), begin, end - part);
            if (share.word.compare_exchange_weak(word, rest, std::memory_order_acq_rel)) {
                *b = front ? begin : end - part;
                *e = *b + part;
                return true;
            }
        }
    }
    void loop(int w) {
        uint32_t seen = 0;
        for (;;) {
            int spins = 0;
            uint32_t now;
            while ((now = epoch_.load(std::memory_order_acquire)) == seen) {
                if (++spins < SPINS) { relax(); continue; }
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return epoch_.load() != seen; });
                sleepers_.fetch_sub(1);
            }
            if (stop_) return;
            seen = now;
            work(w, now);
        }
    }

    const int size_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> threads_;
    std::mutex run_mutex_, mutex_;
    std::condition_variable wake_;
    std::atomic<const RangeTask*> task_{nullptr};
    std::atomic<int64_t> grain_{1};
    std::atomic<int> workers_{1};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
};

std::mutex pool_mutex;
using PoolRef = std::shared_ptr<Pool>;   // a pool lives as long as a call uses it, whatever pool_resize does meanwhile

PoolRef& slot() {   // leaked at exit on purpose: joining threads in static destruction can hang an interpreter
    static auto* p = new PoolRef(std::make_shared<Pool>(1));
    return *p;
}

PoolRef the_pool() {
    std::lock_guard<std::mutex> lock(pool_mutex);
    return slot();
}

void run(int64_t count, int64_t grain, const RangeTask& task, int most_workers) {
    if (count <= 0) return;
    const PoolRef p = the_pool();
    const int workers = p->size() < most_workers ? p->size() : most_workers;
    if (grain == 0) grain = count / (8 * workers);   // small enough that a late thread's share can be taken over
    if (grain < 1) grain = 1;
    if (workers == 1 || count <= grain || count > MOST_UNITS) { task(0, count, 0); return; }
    p->run(count, grain, workers, task);
}

}  // namespace

int pool_threads() { return the_pool()->size(); }

void pool_resize(int threads) {
    if (threads < 1) threads = 1;
    PoolRef old;   // let go of outside the lock: its threads are joined by whoever uses it last
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (slot()->size() == threads) return;
    old = std::exchange(slot(), std::make_shared<Pool>(threads));
}

void parallel_runs(int64_t count, RangeTask task, int most_workers) { run(count, 0, task, most_workers); }

void parallel_chunks(int64_t count, int64_t grain, RangeTask task, int most_workers) { run(count, grain, task, most_workers); }

}  // namespace ork

// A pool of threads that spins briefly, then sleeps. The caller is worker 0.
#pragma once
#include <type_traits>
#include <cstdint>

namespace ork {

// A reference to a callable (begin, end, worker), valid for the call only.
class RangeTask {
  public:
    template <class F> RangeTask(F&& f) : object_(&f), call_([](void* o, int64_t b, int64_t e, int w) { (*(std::remove_reference_t<F>*)o)(b, e, w); }) {}
    void operator()(int64_t b, int64_t e, int w) const { call_(object_, b, e, w); }

  private:
    void* object_;
    void (*call_)(void*, int64_t, int64_t, int);
};

int pool_threads();
void pool_resize(int threads);   // joins the old threads; 1 = everything on the caller

// Every worker has one contiguous run of the units, taken chunk by chunk; who is done takes from the end of another's.
// Decode wants the runs (each thread walks its own stretch of memory), a busy machine the taking over.
// `most_workers` bounds the worker numbers a task sees, for callers that made scratch for so many before.
constexpr int ALL_WORKERS = 1 << 20;
void parallel_runs(int64_t count, RangeTask task, int most_workers = ALL_WORKERS);                     // chunks of an eighth of a run
void parallel_chunks(int64_t count, int64_t grain, RangeTask task, int most_workers = ALL_WORKERS);    // chunks of `grain`, for uneven work

// Rows [begin, end) by f(begin, end). Work below this many elements is done on the calling thread: waking others costs more.
constexpr int64_t INLINE_ELEMENTS = 16 * 1024;
template <class F> void by_rows(int64_t begin, int64_t end, int64_t row_elements, F&& f) {
    if ((end - begin) * row_elements <= INLINE_ELEMENTS) { if (begin < end) f(begin, end); return; }
    parallel_runs(end - begin, [&](int64_t b, int64_t e, int) { f(begin + b, begin + e); });
}
template <class F> void by_rows(int64_t rows, int64_t row_elements, F&& f) { by_rows(0, rows, row_elements, f); }

}  // namespace ork

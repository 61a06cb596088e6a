// Work sharing on OpenMP; the library links to the libgomp.so.1 that torch has loaded, so there is one pool.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace ascend_vllm {
namespace {

// A thread should have this many elementary operations (about ten microseconds of work); below twice that,
// waking others costs more than it saves.
constexpr int64_t kMinWorkPerThread = 32768;

// Threads that `work` elementary operations deserve: 1, or all. Never a number between, since libgomp ends the
// threads that a smaller team leaves over and would create them anew for the next full one.
inline int threads_for(int64_t work) {
  if (work < 2 * kMinWorkPerThread || omp_in_parallel()) return 1;
  return omp_get_max_threads();
}

// Calls body(begin, end) on parts of [0, n), in parallel if n * work_per_item elementary operations deserve it.
template <class Body>
inline void parallel_for(int64_t n, int64_t work_per_item, const Body& body) {
  if (n <= 0) return;
  if (n == 1 || threads_for(n * work_per_item) == 1) {
    body(int64_t{0}, n);
    return;
  }
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads();
    const int64_t thread = omp_get_thread_num();
    const int64_t begin = n * thread / threads;
    const int64_t end = n * (thread + 1) / threads;
    if (begin < end) body(begin, end);
  }
}

}  // namespace
}  // namespace ascend_vllm

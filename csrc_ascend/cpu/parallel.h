// Parallel loops on the threads of cpu/team.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/team.h"

namespace ascend_vllm {
namespace {

// Elementary operations that make a thread worth waking (about three microseconds of work); a job with less
// than twice as many runs in one thread.
constexpr int64_t kMinWorkPerThread = 12288;
// Parts of a job per thread: several, so that a preempted thread delays only one of them.
constexpr int64_t kPartsPerThread = 4;

// Number of threads for `work` elementary operations: 1, or all.
inline int threads_for(int64_t work) { return work < 2 * kMinWorkPerThread ? 1 : team_threads(); }

// Calls part(index, thread) for each index below `parts`, see run_team.
template <class Part>
inline void run_parts(int64_t parts, int threads, const Part& part) {
  run_team(
      parts, threads,
      [](const void* context, int64_t index, int64_t thread) {
        (*static_cast<const Part*>(context))(index, thread);
      },
      &part);
}

// Which of `parts` the index-th one to be taken is, so that each thread's follow one another while threads take
// them in turn: weights that a thread reads are then one stream, and what it prefetches behind a part is its
// next one.
inline int64_t part_in_turn(int64_t index, int64_t parts, int threads) {
  const int64_t thread = index % threads, longer = parts % threads;
  return thread * (parts / threads) + std::min(thread, longer) + index / threads;
}

// Calls body(begin, end) on parts of [0, n), in parallel if n * work_per_item elementary operations are enough.
template <class Body>
inline void parallel_for(int64_t n, int64_t work_per_item, const Body& body) {
  if (n <= 0) return;
  const int64_t work = n * work_per_item;
  const int threads = n == 1 ? 1 : threads_for(work);
  if (threads == 1) {
    body(int64_t{0}, n);
    return;
  }
  const int64_t max_parts = std::max<int64_t>(threads, work / kMinWorkPerThread);
  const int64_t parts = std::min(std::min(n, threads * kPartsPerThread), max_parts);
  run_parts(parts, threads, [&](int64_t part, int64_t) { body(n * part / parts, n * (part + 1) / parts); });
}

}  // namespace
}  // namespace ascend_vllm

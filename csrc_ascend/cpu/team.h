// The threads that share the kernels' work.
//
// A job is a number of parts, which whoever is free takes one after another. The caller takes parts, too, and
// waits for those that others are at, but never for a thread: one that does not get a core takes nothing, and
// nobody misses it. So a busy machine makes a job longer by what it takes away, and not by its time slices.
#pragma once

#include <cstdint>

namespace ascend_vllm {

// Threads that a caller may have, itself included: what torch.set_num_threads or OMP_NUM_THREADS say. 1 inside
// a job, and for one thread as long as another one's job is under way.
int team_threads();

// Calls part(context, index, thread) once for each index below `parts`, thread being 0 … threads - 1, no two of
// them the same at a time. `threads` is team_threads() or less.
void run_team(int64_t parts, int threads, void (*part)(const void* context, int64_t index, int64_t thread),
              const void* context);

}  // namespace ascend_vllm

// The thread pool of the kernels.
//
// A job is a number of parts. Free threads and the caller take parts one after another, and the caller waits
// until all parts are done, but never for a thread to start: a thread without a core takes no parts. So other
// load on the machine slows a job down by the time it uses, not by whole scheduler time slices.
#pragma once

#include <cstdint>

namespace ascend_vllm {

// Number of threads for a job, including the caller, set by torch.set_num_threads or OMP_NUM_THREADS. 1 inside
// a job, and while another thread's job runs.
int team_threads();

// Calls part(context, index, thread) once for each index below `parts`; concurrent calls have different values
// of thread, 0 … threads - 1. `threads` is at most team_threads().
void run_team(int64_t parts, int threads, void (*part)(const void* context, int64_t index, int64_t thread),
              const void* context);

}  // namespace ascend_vllm

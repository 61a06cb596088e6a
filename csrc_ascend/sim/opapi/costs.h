// What operators cost a device by the simulator's count: bytes that kernels read and write, each once, and the
// memory that they work in.
#pragma once

#include <cstdint>
#include <string>

namespace ascend_sim {

struct Cost {
  int64_t read = 0;
  int64_t written = 0;
  int64_t workspace = 0;
};

// What the call that this thread plans costs. Unless its row says it, it reads and writes all of its tensors
// and needs no workspace; rows of operators that use parts of a tensor say it.
void costs(Cost cost);
// Adds to that: results that the operator reads before it writes them.
void also_reads(int64_t bytes);
Cost planned_cost();

// An operator was launched by the host, and it ran on the device: at once, or at each replay of a graph.
void count_launch(const std::string& name, const Cost& cost);
void count_run(const std::string& name, const Cost& cost);

}  // namespace ascend_sim

// Counters of launches and costs, and the function by which tests read them.
#include "sim/opapi/costs.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace ascend_sim {
namespace {

thread_local Cost planned;

struct Total {
  int64_t launches = 0;
  int64_t runs = 0;
  Cost cost;  // of all runs; the largest workspace of a launch
};

std::mutex g_mutex;
std::map<std::string, Total> g_totals;

}  // namespace

void costs(Cost cost) { planned = cost; }
void also_reads(int64_t bytes) { planned.read += bytes; }
Cost planned_cost() { return planned; }

void count_launch(const std::string& name, const Cost& cost) {
  const std::lock_guard<std::mutex> guard(g_mutex);
  Total& total = g_totals[name];
  ++total.launches;
  total.cost.workspace = std::max(total.cost.workspace, cost.workspace);
}

void count_run(const std::string& name, const Cost& cost) {
  const std::lock_guard<std::mutex> guard(g_mutex);
  Total& total = g_totals[name];
  ++total.runs;
  total.cost.read += cost.read;
  total.cost.written += cost.written;
}

}  // namespace ascend_sim

// The operators launched or run since the last call, one per line: its name, how often it was launched and run,
// the bytes that its runs read and wrote, and the largest workspace of a launch. The text lasts until the next
// call.
extern "C" __attribute__((visibility("default"))) const char* ascend_sim_take_launched() {
  static std::string text;
  const std::lock_guard<std::mutex> guard(ascend_sim::g_mutex);
  text.clear();
  for (const auto& [name, total] : ascend_sim::g_totals) {
    text += name;
    for (const int64_t value :
         {total.launches, total.runs, total.cost.read, total.cost.written, total.cost.workspace}) {
      text += " " + std::to_string(value);
    }
    text += "\n";
  }
  ascend_sim::g_totals.clear();
  return text.c_str();
}

// Runs the checks with the sets that the machine has, or with those that are named:
//
//   check-aarch64 [SET...]
//
// Prints a line for each set and kernel. Exit code 1: a result was wrong, or a set is not possible here.
#include <cstdio>
#include <cstring>
#include <sstream>

#include "cpu/check/check.h"

extern "C" const char* ascend_vllm_cpu_isas();
extern "C" int ascend_vllm_set_cpu_isa(int choice, const char* name);

namespace ascend_vllm::check {
namespace {

constexpr int kShownFailures = 3;  // of a case
int64_t num_failed = 0;

}  // namespace

std::vector<Check>& checks() {
  static std::vector<Check> all;
  return all;
}

int64_t Case::num_failed() { return check::num_failed; }

void Case::fail(int64_t at, double got, double want, double bound) {
  ++check::num_failed;
  if (shown_++ < kShownFailures) {
    std::printf("%s [%ld]: got %.9g, want %.9g, bound %.3g\n", name_.c_str(), static_cast<long>(at), got, want,
                bound);
  }
}

}  // namespace ascend_vllm::check

int main(int count, char** arguments) {
  using ascend_vllm::check::Case;
  std::vector<std::string> sets(arguments + 1, arguments + count);
  if (sets.empty()) {
    std::istringstream names(ascend_vllm_cpu_isas());
    for (std::string name; std::getline(names, name, ',');) sets.push_back(name);
  }
  for (const std::string& set : sets) {
    if (ascend_vllm_set_cpu_isa(-1, set.c_str()) != 0) {
      std::printf("%s: not possible, the machine has %s\n", set.c_str(), ascend_vllm_cpu_isas());
      return 1;
    }
    for (const auto& check : ascend_vllm::check::checks()) {
      const int64_t before = Case::num_failed();
      check.run();
      const bool is_right = Case::num_failed() == before;
      std::printf("%s %s %s\n", set.c_str(), check.kernel, is_right ? "ok" : "WRONG");
      std::fflush(stdout);
    }
  }
  return Case::num_failed() == 0 ? 0 : 1;
}

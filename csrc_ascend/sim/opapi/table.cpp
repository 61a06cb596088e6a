// Planning and launching of operators, and the list of those that the library has.
#include "sim/opapi/table.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace ascend_sim {
namespace {

thread_local const char* current = "aclnn";

// While an operator is parsed or run: its name for refusals, and ATen without the modes of the calling thread,
// so that the simulator's own arithmetic is never seen by the caller's.
class Scope {
 public:
  explicit Scope(const char* name) : outer_(current) { current = name; }
  ~Scope() { current = outer_; }
  Scope(const Scope&) = delete;

 private:
  const char* outer_;
  c10::InferenceMode no_autograd_{true};
  c10::impl::ExcludeDispatchKeyGuard no_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

std::vector<std::string>& operators() {
  static std::vector<std::string> names;
  return names;
}

aclnnStatus failed(const char* name, const std::exception& error, aclnnStatus code) {
  if (dynamic_cast<const Refusal*>(&error)) {
    set_error(error.what());
    return code;
  }
  const auto* aten = dynamic_cast<const c10::Error*>(&error);
  set_error(std::string(name) + ": " + (aten ? aten->what_without_backtrace() : error.what()));
  if (const auto* runtime = dynamic_cast<const RuntimeError*>(&error)) return runtime->code;
  return code;
}

}  // namespace

void require(bool condition, std::string_view argument, const std::string& why) {
  if (!condition) throw Refusal(current, std::string(argument), why);
}

Cost Tensors::cost() const {
  Cost sum;
  for (const In* tensor : read_) sum.read += bytes_of(*tensor);
  for (const Out* tensor : written_) {
    sum.written += bytes_of(*tensor);
    // what an operator computes in place is named so; what it only overwrites is a selfRef
    if (tensor->name == "self") sum.read += bytes_of(*tensor);
  }
  return sum;
}

bool add_operator(const char* name) {
  operators().emplace_back(name);
  return true;
}

std::vector<std::string> argument_names(std::string_view parameters) {
  std::vector<std::string> names;
  size_t end = 0;
  while ((end = parameters.find_first_of(",)", end)) != std::string_view::npos) {
    const size_t start = parameters.find_last_of(" (", end) + 1;
    names.emplace_back(parameters.substr(start, end - start));
    ++end;
  }
  return names;
}

std::string trace_line(const char* name, const std::vector<std::string>& names,
                       const std::vector<std::string>& values) {
  std::string line = std::string("{\"op\": \"") + name + "\", \"args\": {";
  for (size_t i = 0; i < names.size(); ++i) {
    line += (i ? ", \"" : "\"") + names[i] + "\": " + values[i];
  }
  return line + "}}";
}

void Tensors::refuse_overlaps() const {
  for (size_t i = 0; i < written_.size(); ++i) {
    for (const In* tensor : read_) written_[i]->refuse_overlap(*tensor);
    for (size_t j = 0; j < i; ++j) written_[i]->refuse_overlap(*written_[j]);
  }
}

aclnnStatus plan(const char* name, const std::function<Work()>& parse,
                 const std::function<std::string()>& trace, uint64_t* workspace, aclOpExecutor** executor) {
  if (!workspace || !executor) {
    set_error(std::string(name) + "GetWorkspaceSize: workspaceSize and executor must not be null");
    return kNullPointer;
  }
  try {
    const Scope scope(name);
    costs({});
    Work work = parse();
    *workspace = planned_cost().workspace;
    *executor = new aclOpExecutor{name, tracing() ? trace() : std::string(), std::move(work), planned_cost()};
    return kSuccess;
  } catch (const std::exception& error) {
    return failed(name, error, kInvalidArgument);
  }
}

aclnnStatus launch(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor,
                   aclrtStream stream) {
  const std::unique_ptr<aclOpExecutor> owned(executor);
  if (!owned || owned->name != name) {
    set_error(std::string(name) + ": executor: it was not made by " + name + "GetWorkspaceSize");
    return kInvalidArgument;
  }
  const Cost cost = owned->cost;
  const auto needed = static_cast<uint64_t>(cost.workspace);
  if (needed > 0 && (bytes < needed || !on_device(workspace, needed))) {
    set_error(std::string(name) + ": workspace: " + std::to_string(bytes) + " bytes, but " +
              std::to_string(needed) + " on the device are needed");
    return kInvalidArgument;
  }
  try {
    if (!owned->trace.empty()) trace(owned->trace);
    count_launch(owned->name, cost);
    submit(stream, owned->name, [name, cost, work = std::move(owned->work)] {
      const Scope scope(name);
      work();
      count_run(name, cost);
    });
    return kSuccess;
  } catch (const std::exception& error) {
    return failed(name, error, kExecutionFailed);
  }
}

}  // namespace ascend_sim

// Names of all operators of the library, one per line, sorted.
extern "C" __attribute__((visibility("default"))) const char* ascend_sim_operators() {
  static const std::string text = [] {
    std::vector<std::string> names = ascend_sim::operators();
    std::sort(names.begin(), names.end());
    std::string joined;
    for (const std::string& name : names) joined += name + "\n";
    return joined;
  }();
  return text.c_str();
}

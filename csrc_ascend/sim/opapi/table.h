// The table of simulated operators: one row per operator of the aclnn interface.
//
//   OPERATOR(aclnnMm, (In self, In mat2, Out out, int8_t cube_math_type), {
//     mat2.like(self.in(kFloats).rank(2, 2)).rank(2, 2);
//     return [=] { out.set(at::mm(self, mat2)); };
//   })
//
// The row is named as in the interface and lists the arguments in its order; types are those of arguments.h.
// Its body checks the arguments and returns the work. The body runs in aclnnXGetWorkspaceSize, the work when
// the stream runs it: at once, or at every replay of a graph that recorded it. Only the work may read what
// tensors hold. A check that fails, in the body or in the work, refuses the call with a text that names the
// operator and the argument.
#pragma once

#include <array>
#include <exception>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "sim/opapi/arguments.h"
#include "sim/runtime.h"

// A row lists all arguments of the interface, also those that do not matter here.
#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace ascend_sim {

using Work = std::function<void()>;

// Names of the arguments in the text of a row's parameter list.
std::vector<std::string> argument_names(std::string_view parameters);

// Adds an operator to the list that `ascend_sim_operators` returns.
bool add_operator(const char* name);

// Makes a launch of what `parse` returns; turns what it throws into an error code and text.
aclnnStatus plan(const char* name, const std::function<Work()>& parse,
                 const std::function<std::string()>& trace, uint64_t* workspace, aclOpExecutor** executor);

// Runs (or records) a launch on a stream and frees it. Its workspace must have the planned size.
aclnnStatus launch(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor,
                   aclrtStream stream);

std::string trace_line(const char* name, const std::vector<std::string>& names,
                       const std::vector<std::string>& values);

// The tensors of one call: outputs must not overlap inputs, and a call costs all of them unless it says
// otherwise.
class Tensors {
 public:
  void add(const In& tensor) { read_.push_back(&tensor); }
  void add(const Out& tensor) { written_.push_back(&tensor); }
  template <typename T>
  void add(const std::optional<T>& value) {
    if (value) add(*value);
  }
  template <typename T>
  void add(const std::vector<T>& values) {
    if constexpr (!std::is_arithmetic_v<T>) {
      for (const T& value : values) add(value);
    }
  }
  template <typename T>
    requires(!std::is_base_of_v<In, T>)
  void add(const T&) {}
  void refuse_overlaps() const;
  Cost cost() const;

 private:
  std::vector<const In*> read_;
  std::vector<const Out*> written_;
};

// The C function behind aclnnXGetWorkspaceSize, with the signature that the row's parameters imply.
template <typename Function>
struct Entry;

template <typename... Args>
struct Entry<Work (*)(Args...)> {
  template <typename Row>
  static aclnnStatus get_workspace_size(typename Argument<Args>::C... values, uint64_t* workspace,
                                        aclOpExecutor** executor) {
    static const std::vector<std::string> names = argument_names(Row::kParameters);
    const auto call = [&] { return parse<Row>(names, std::index_sequence_for<Args...>(), values...); };
    const auto line = [&] { return trace_line(Row::kName, names, {Argument<Args>::trace(values)...}); };
    return plan(Row::kName, call, line, workspace, executor);
  }

 private:
  template <typename Row, size_t... I>
  static Work parse(const std::vector<std::string>& names, std::index_sequence<I...>,
                    typename Argument<Args>::C... values) {
    // braces guarantee the order, so that the first invalid argument is reported
    std::tuple<Args...> parsed{Argument<Args>::parse(values, names.at(I))...};
    Tensors tensors;
    (tensors.add(std::get<I>(parsed)), ...);
    tensors.refuse_overlaps();
    costs(tensors.cost());
    return std::apply(Row::body, std::move(parsed));
  }
};

}  // namespace ascend_sim

// A C function cannot be made from a list of types in standard C++. The resolver below is run when the symbol
// is looked up and names the instance of the template above that takes the place of the declared function.
#define OPERATOR(operator_name, parameters, ...)                                                       \
  namespace {                                                                                          \
  struct operator_name##Row {                                                                          \
    static constexpr const char* kName = #operator_name;                                               \
    static constexpr const char* kParameters = #parameters;                                            \
    static ::ascend_sim::Work body parameters __VA_ARGS__                                              \
  };                                                                                                   \
  [[maybe_unused]] const bool operator_name##_listed = ::ascend_sim::add_operator(#operator_name);     \
  }                                                                                                    \
  extern "C" {                                                                                         \
  using operator_name##Function = void();                                                              \
  __attribute__((used)) static operator_name##Function* operator_name##_resolve() {                    \
    using Entry = ::ascend_sim::Entry<decltype(&operator_name##Row::body)>;                            \
    return reinterpret_cast<operator_name##Function*>(&Entry::get_workspace_size<operator_name##Row>); \
  }                                                                                                    \
  __attribute__((visibility("default"), ifunc(#operator_name "_resolve"))) void                        \
  operator_name##GetWorkspaceSize();                                                                   \
  __attribute__((visibility("default"))) aclnnStatus operator_name(void* workspace, uint64_t bytes,    \
                                                                   aclOpExecutor* executor,            \
                                                                   aclrtStream stream) {               \
    return ::ascend_sim::launch(#operator_name, workspace, bytes, executor, stream);                   \
  }                                                                                                    \
  }

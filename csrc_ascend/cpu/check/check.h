// Checks of the kernels against plain loops in double precision, as a program of its own that needs no torch:
// for machines that have none, and for emulators. tests/ops has the full tests.
//
// A check calls a kernel of every instruction set with numbers of odd shapes, and names each case that is
// wrong.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "cpu/isa/convert.h"

namespace ascend_vllm::check {

// Numbers that are the same on every machine (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  // Between -size and size.
  double number(double size = 1.0) { return size * (std::ldexp(static_cast<double>(bits() >> 11), -52) - 1.0); }

 private:
  uint64_t state_;
};

// Relative error of rounding to a type, and its tag.
template <class T>
constexpr double kRounding = 0x1p-24;
template <>
inline constexpr double kRounding<bfloat16> = 0x1p-8;
template <>
inline constexpr double kRounding<float16> = 0x1p-11;
// Half of the smallest number of a type, where that matters.
template <class T>
constexpr double kLeast = 0.0;
template <>
inline constexpr double kLeast<float16> = 0x1p-25;
template <class T>
constexpr DType kDType = DType::kFloat32;
template <>
inline constexpr DType kDType<bfloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDType<float16> = DType::kFloat16;

template <class T>
std::vector<T> numbers(Random& random, int64_t count, double size = 1.0) {
  std::vector<T> made(static_cast<size_t>(count));
  for (T& x : made) x = from_float<T>(static_cast<float>(random.number(size)));
  return made;
}

// What a kernel was given, and how far its results may be off.
class Case {
 public:
  Case(std::string kernel, std::string shape) : name_(std::move(kernel) + " " + std::move(shape)) {}

  // `got` is `want` rounded to its type, but for an error of `slack` before that.
  template <class T>
  void near(const T& got, double want, double slack, int64_t at) {
    const double number = to_float(got), bound = 1.01 * kRounding<T> * std::abs(want) + kLeast<T> + slack;
    const bool is_same = std::isnan(want) ? std::isnan(number) : number == want;
    if (!is_same && !(std::abs(number - want) <= bound)) fail(at, number, want, bound);
  }
  void equal(double got, double want, int64_t at) {
    if (!(got == want)) fail(at, got, want, 0.0);
  }

  static int64_t num_failed();

 private:
  void fail(int64_t at, double got, double want, double bound);

  std::string name_;
  int shown_ = 0;
};

// Every check of the program by the name of its kernel.
struct Check {
  const char* kernel;
  void (*run)();
};
std::vector<Check>& checks();
struct Registration {
  Registration(const char* kernel, void (*run)()) { checks().push_back({kernel, run}); }
};

#define ASCEND_VLLM_CHECK(kernel)                                                                \
  static void check_##kernel();                                                                  \
  static const ::ascend_vllm::check::Registration registered_##kernel(#kernel, &check_##kernel); \
  static void check_##kernel()

// Calls body(T{}) with each storage type.
template <class Body>
void for_dtypes(const Body& body) {
  body(float{});
  body(bfloat16{});
  body(float16{});
}

template <class T>
std::string shape_of(std::initializer_list<int64_t> sizes) {
  std::string text = kDType<T> == DType::kFloat32    ? "float32"
                     : kDType<T> == DType::kBFloat16 ? "bfloat16"
                                                     : "float16";
  for (const int64_t size : sizes) text += " " + std::to_string(size);
  return text;
}

}  // namespace ascend_vllm::check

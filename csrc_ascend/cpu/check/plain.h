// Plain definitions that several checks use.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "cpu/check/check.h"
#include "cpu/kernels/expert_rows.h"
#include "cpu/kernels/gate.h"
#include "cpu/kernels/pack.h"

namespace ascend_vllm::check {

inline double activate(Gate gate, double x) {
  switch (gate) {
    case Gate::kSilu:
      return x / (1.0 + std::exp(-x));
    case Gate::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    default:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
  }
}

// How far an activation of x may be off before it is rounded to T: a coarser one is allowed where T is
// (gate.h).
template <class T>
double gate_slack(double x) {
  const double relative = kDType<T> == DType::kBFloat16 ? 3e-4 : 8e-7;
  return relative * std::abs(x) + 1e-7;
}

// The number that a byte of a cache stands for, without its scale.
inline float byte_number(CacheFormat format, uint8_t byte) {
  if (format == CacheFormat::kInt8) return static_cast<int8_t>(byte);
  const int mantissa_bits = format == CacheFormat::kFloat8E4m3 ? 3 : 2, bias = mantissa_bits == 3 ? 7 : 15;
  const int exponent = (byte & 0x7f) >> mantissa_bits, mantissa = byte & ((1 << mantissa_bits) - 1);
  const double size = exponent == 0
                          ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                          : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return static_cast<float>((byte & 0x80) != 0 ? -size : size);
}

// A sum of products, and how far one in float32 may be off.
struct Dot {
  double value = 0.0;
  double size = 0.0;   // of its terms
  double error = 0.0;  // that terms have before they are added

  void add(double a, double b, double off = 0.0) {
    value += a * b;
    size += std::abs(a * b);
    error += off;
  }
  double slack() const { return 8 * 0x1p-24 * size + error; }
};

template <class A, class B>
Dot dot(const A* a, const B* b, int64_t n) {
  Dot sum;
  for (int64_t i = 0; i < n; ++i) sum.add(to_float(a[i]), to_float(b[i]));
  return sum;
}

// activation(gate) * up, where both were rounded to T before.
struct Gated {
  double value, slack;
};
template <class T>
Gated gated(Gate gate, const Dot& of_gate, const Dot& of_up) {
  constexpr double kSteepest = 1.2;  // derivative of an activation
  const double x = of_gate.value, active = activate(gate, x);
  const double gate_off = of_gate.slack() + 1.01 * kRounding<T> * std::abs(x);
  const double up_off = of_up.slack() + 1.01 * kRounding<T> * std::abs(of_up.value);
  const double active_off = kSteepest * gate_off + gate_slack<T>(x);
  return {active * of_up.value, active_off * (std::abs(of_up.value) + up_off) + std::abs(active) * up_off};
}

// A weight [outputs, inputs] in panels of 16 outputs, packed in two parts.
template <class T>
struct Packed {
  static constexpr int64_t kUnitBytes = kDType<T> == DType::kFloat16 ? 2 : 4;
  int64_t units;
  std::vector<T> numbers;

  Packed(const std::vector<T>& weight, int64_t outputs, int64_t inputs)
      : units((inputs * static_cast<int64_t>(sizeof(T)) + kUnitBytes - 1) / kUnitBytes),
        numbers((outputs + 15) / 16 * 16 * units * (kUnitBytes / sizeof(T))) {
    const int64_t first = outputs / 3;
    for (const auto& [row, rows] : {std::pair<int64_t, int64_t>{0, first}, {first, outputs - first}}) {
      pack_panels_kernel({.weight = reinterpret_cast<const char*>(weight.data() + row * inputs),
                          .packed = reinterpret_cast<char*>(numbers.data()),
                          .first_row = row,
                          .rows = rows,
                          .in_features = inputs,
                          .row_bytes = inputs * static_cast<int64_t>(sizeof(T)),
                          .element_bytes = sizeof(T),
                          .unit_bytes = kUnitBytes});
    }
  }
};

// Experts that tokens use, one of which is none of these.
struct Choices {
  int64_t tokens, choices, experts;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  Choices(Random& random, int64_t count, int64_t each, int64_t of)
      : tokens(count), choices(each), experts(of), weights(numbers<float>(random, count * each)) {
    for (int64_t i = 0; i < count * each; ++i) ids.push_back(static_cast<int32_t>(random.below(of)));
    ids.back() = static_cast<int32_t>(of);
  }
  template <class T>
  void fill(ExpertChoices& args, const std::vector<T>& x, const std::vector<T>& shared,
            const std::vector<T>& shared_gate, std::vector<T>& out, int64_t hidden) const {
    args.dtype = kDType<T>;
    args.x = x.data();
    args.ids = ids.data();
    args.weights = weights.data();
    args.shared = shared.data();
    args.shared_gate = shared_gate.data();
    args.out = out.data();
    args.tokens = tokens;
    args.hidden = args.x_stride = hidden;
    args.choices = choices;
    args.num_experts = experts;
  }
  template <class T>
  std::vector<Dot> shared_results(const std::vector<T>& shared, const std::vector<T>& shared_gate, int64_t t,
                                  int64_t hidden) const {
    std::vector<Dot> sums(hidden);
    const double factor = 1.0 / (1.0 + std::exp(-static_cast<double>(to_float(shared_gate[t]))));
    for (int64_t n = 0; n < hidden; ++n) {
      // the product with the gate may be rounded
      const double value = to_float(shared[t * hidden + n]);
      sums[n].add(value, factor, kRounding<T> * 2 * std::abs(value * factor));
    }
    return sums;
  }
};

// Adds weight times the product of an expert's second matrix, whose inputs were rounded.
template <class Weight>
void add_expert(std::vector<Dot>& sums, const std::vector<double>& inputs, const std::vector<double>& slack,
                double weight, const Weight& matrix) {
  for (size_t n = 0; n < sums.size(); ++n) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const double w = matrix(n, i) * weight;
      sums[n].add(inputs[i], w, slack[i] * std::abs(w));
    }
  }
}

}  // namespace ascend_vllm::check

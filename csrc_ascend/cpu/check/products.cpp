// Matrix products with weights in 16 or 32 bits, and mixtures of experts of them.
#include <algorithm>

#include "cpu/check/check.h"
#include "cpu/check/plain.h"
#include "cpu/kernels/experts.h"
#include "cpu/kernels/gemm.h"
#include "cpu/kernels/latent_heads.h"
#include "cpu/kernels/pack.h"

namespace ascend_vllm::check {
namespace {

// outputs, inputs
constexpr std::pair<int64_t, int64_t> kWeights[] = {{1, 1}, {16, 8}, {17, 7}, {80, 33}, {96, 600}, {33, 1025}};
constexpr int64_t kRows[] = {1, 2, 3, 5, 8, 14, 17, 40};

ASCEND_VLLM_CHECK(pack_panels) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const auto& [outputs, inputs] : kWeights) {
      Random random(inputs);
      const auto weight = numbers<T>(random, outputs * inputs);
      const Packed<T> packed(weight, outputs, inputs);
      Case own("pack_panels", shape_of<T>({outputs, inputs}));
      for (int64_t i = 0; i < outputs * inputs; ++i) {
        const int64_t n = i / inputs, k = i % inputs, pairs = kDType<T> == DType::kBFloat16 ? 2 : 1;
        const int64_t unit = n / 16 * packed.units * 16 + k / pairs * 16 + n % 16;
        own.equal(to_float(packed.numbers[unit * pairs + k % pairs]), to_float(weight[i]), i);
      }
    }
  });
}

ASCEND_VLLM_CHECK(unpack_rows) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const auto& [outputs, inputs] : kWeights) {
      Random random(inputs);
      const auto weight = numbers<T>(random, outputs * inputs);
      const Packed<T> packed(weight, outputs, inputs);
      const int64_t indices[] = {outputs - 1, 0, outputs / 2};
      std::vector<T> out(3 * inputs);
      unpack_rows_kernel({reinterpret_cast<const char*>(packed.numbers.data()), indices,
                          reinterpret_cast<char*>(out.data()), 3, inputs, sizeof(T), Packed<T>::kUnitBytes});
      Case own("unpack_rows", shape_of<T>({outputs, inputs}));
      for (int64_t i = 0; i < 3 * inputs; ++i) {
        own.equal(to_float(out[i]), to_float(weight[indices[i / inputs] * inputs + i % inputs]), i);
      }
    }
  });
}

// x[rows, inputs] by the packed weight, whose bias may be null.
template <class T>
std::vector<T> multiply(const T* x, int64_t rows, int64_t inputs, const Packed<T>& packed, int64_t outputs,
                        const T* bias, bool is_gated, Gate gate) {
  LinearArgs args{};
  const int64_t width = is_gated ? outputs / 2 : outputs;
  std::vector<T> out(rows * width);
  std::vector<float> workspace(linear_workspace(rows, inputs));
  args.dtype = kDType<T>;
  args.x = x;
  args.packed = packed.numbers.data();
  args.bias = bias;
  args.out = out.data();
  args.workspace = workspace.data();
  args.rows = rows;
  args.x_stride = inputs;
  args.out_stride = width;
  args.in_features = inputs;
  args.out_features = outputs;
  args.is_gated = is_gated;
  args.gate = gate;
  packed_linear_kernel(args);
  return out;
}

ASCEND_VLLM_CHECK(packed_linear) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const auto& [outputs, inputs] : kWeights) {
      Random random(outputs);
      const auto weight = numbers<T>(random, outputs * inputs), bias = numbers<T>(random, outputs);
      const Packed<T> packed(weight, outputs, inputs);
      for (const int64_t rows : kRows) {
        for (const bool is_gated : {false, true}) {
          if (is_gated && outputs % 32 != 0) continue;
          const auto x = numbers<T>(random, rows * inputs);
          const bool has_bias = rows % 2 == 1;
          const auto out = multiply(x.data(), rows, inputs, packed, outputs, has_bias ? bias.data() : nullptr,
                                    is_gated, Gate::kGelu);
          const int64_t width = is_gated ? outputs / 2 : outputs;
          Case own("packed_linear", shape_of<T>({rows, inputs, outputs, is_gated}));
          const auto product = [&](int64_t row, int64_t n) {
            Dot sum = dot(x.data() + row * inputs, weight.data() + n * inputs, inputs);
            if (has_bias) sum.add(to_float(bias[n]), 1.0);
            return sum;
          };
          for (int64_t i = 0; i < rows * width; ++i) {
            const Dot sum = product(i / width, i % width);
            if (is_gated) {
              const Gated want = gated<T>(Gate::kGelu, sum, product(i / width, i % width + width));
              own.near(out[i], want.value, want.slack, i);
            } else {
              own.near(out[i], sum.value, sum.slack(), i);
            }
          }
        }
      }
    }
  });
}

// Results of rows do not depend on the number of rows.
ASCEND_VLLM_CHECK(packed_linear_rows) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    const int64_t outputs = 80, inputs = 700, most = 150;
    Random random(5);
    const auto weight = numbers<T>(random, outputs * inputs), x = numbers<T>(random, most * inputs);
    const Packed<T> packed(weight, outputs, inputs);
    const auto all = multiply<T>(x.data(), most, inputs, packed, outputs, nullptr, false, Gate::kSilu);
    for (const int64_t rows : kRows) {
      const auto few = multiply<T>(x.data(), rows, inputs, packed, outputs, nullptr, false, Gate::kSilu);
      Case own("packed_linear_rows", shape_of<T>({rows}));
      for (int64_t i = 0; i < rows * outputs; ++i) own.equal(to_float(few[i]), to_float(all[i]), i);
    }
  });
}

ASCEND_VLLM_CHECK(heads_linear) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t tokens : {1, 4, 19}) {
      const int64_t heads = 3, inputs = 40, outputs = 24, further = 8, width = inputs + further;
      Random random(tokens);
      const auto x = numbers<T>(random, tokens * heads * width);
      std::vector<std::vector<T>> weights;
      std::vector<T> packed;
      for (int64_t h = 0; h < heads; ++h) {
        weights.push_back(numbers<T>(random, outputs * inputs));
        const Packed<T> own(weights.back(), outputs, inputs);
        packed.insert(packed.end(), own.numbers.begin(), own.numbers.end());
      }
      const int64_t row = outputs + further;
      std::vector<T> out(tokens * heads * row);
      std::vector<float> workspace(heads * linear_workspace(tokens, inputs));
      heads_linear_kernel({kDType<T>, x.data(), heads * width, width, packed.data(), out.data(),
                           workspace.data(), tokens, heads, inputs, outputs, further});
      Case own("heads_linear", shape_of<T>({tokens}));
      for (int64_t i = 0; i < tokens * heads * row; ++i) {
        const T* from = x.data() + i / row * width;
        const int64_t n = i % row;
        if (n >= outputs) {
          own.equal(to_float(out[i]), to_float(from[inputs + n - outputs]), i);
          continue;
        }
        const Dot sum = dot(from, weights[i / row % heads].data() + n * inputs, inputs);
        own.near(out[i], sum.value, sum.slack(), i);
      }
    }
  });
}

ASCEND_VLLM_CHECK(experts_mlp) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t tokens : {1, 3, 30}) {
      const int64_t experts = 5, hidden = 40, inner = 48, choices = 2;
      Random random(tokens);
      const auto x = numbers<T>(random, tokens * hidden), shared = numbers<T>(random, tokens * hidden);
      const auto shared_gate = numbers<T>(random, tokens);
      const Choices chosen(random, tokens, choices, experts);
      std::vector<std::vector<T>> ups, downs;
      std::vector<T> packed_ups, packed_downs;
      for (int64_t e = 0; e < experts; ++e) {
        ups.push_back(numbers<T>(random, 2 * inner * hidden));
        downs.push_back(numbers<T>(random, hidden * inner, 0.3));
        const Packed<T> up(ups.back(), 2 * inner, hidden), down(downs.back(), hidden, inner);
        packed_ups.insert(packed_ups.end(), up.numbers.begin(), up.numbers.end());
        packed_downs.insert(packed_downs.end(), down.numbers.begin(), down.numbers.end());
      }
      std::vector<T> out(tokens * hidden);
      ExpertsArgs args{};
      chosen.fill(args, x, shared, shared_gate, out, hidden);
      args.gate_up = packed_ups.data();
      args.down = packed_downs.data();
      args.inner = args.down_inputs = inner;
      args.gate = Gate::kSilu;
      std::vector<char> workspace(ExpertsMemory(args).bytes);
      args.workspace = workspace.data();
      experts_mlp_kernel(args);
      Case own("experts_mlp", shape_of<T>({tokens}));
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<Dot> sums = chosen.shared_results(shared, shared_gate, t, hidden);
        for (int64_t c = 0; c < choices; ++c) {
          const int64_t e = chosen.ids[t * choices + c];
          if (e < 0 || e >= experts) continue;
          std::vector<double> middle(inner), slack(inner);
          for (int64_t i = 0; i < inner; ++i) {
            const T* row = x.data() + t * hidden;
            const Dot gate = dot(row, ups[e].data() + i * hidden, hidden);
            const Dot up = dot(row, ups[e].data() + (inner + i) * hidden, hidden);
            const Gated rounded = gated<T>(Gate::kSilu, gate, up);
            middle[i] = rounded.value;
            slack[i] = rounded.slack + kRounding<T> * std::abs(rounded.value);
          }
          add_expert(sums, middle, slack, chosen.weights[t * choices + c],
                     [&](int64_t n, int64_t i) { return to_float(downs[e][n * inner + i]); });
        }
        for (int64_t n = 0; n < hidden; ++n)
          own.near(out[t * hidden + n], sums[n].value, sums[n].slack(), t * hidden + n);
      }
    }
  });
}

}  // namespace
}  // namespace ascend_vllm::check

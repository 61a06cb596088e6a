// Products with weights in 8 or 4 bits and with inputs in 8 bits, and mixtures of experts of them.
#include <algorithm>
#include <tuple>

#include "cpu/check/check.h"
#include "cpu/check/plain.h"
#include "cpu/kernels/quant_experts.h"
#include "cpu/kernels/quant_gemm.h"
#include "cpu/kernels/quant_pack.h"
#include "cpu/kernels/quant_tokens.h"

namespace ascend_vllm::check {
namespace {

// A weight [outputs, inputs] in codes, with scales and perhaps zeros of groups of inputs.
struct Codes {
  Code code;
  int64_t outputs, inputs, group, groups, words;
  std::vector<uint8_t> values, zeros;
  std::vector<uint32_t> packed;
  std::vector<float> scales;

  Codes(Random& random, Code kind, int64_t n, int64_t k, int64_t group_size, bool has_zeros)
      : code(kind),
        outputs(n),
        inputs(k),
        group(group_size),
        groups((k + group_size - 1) / group_size),
        words((k * bits_of(kind) + 31) / 32) {
    const int64_t panels = (n + 15) / 16;
    for (int64_t i = 0; i < n * k; ++i) {
      const uint64_t bits = random.bits();
      // floats without NaN, of which some are subnormal
      values.push_back(static_cast<uint8_t>(kind == Code::kUint4   ? bits & 15
                                            : kind == Code::kUint8 ? bits
                                                                   : bits & 0xaf));
    }
    packed.resize(panels * words * 16);
    pack_codes_kernel({values.data(), packed.data(), 0, n, k, k, words, bits_of(kind)});
    for (int64_t i = 0; i < panels * groups * 16; ++i) {
      scales.push_back(static_cast<float>(0.02 + 0.01 * random.number()));
      if (has_zeros) zeros.push_back(static_cast<uint8_t>(random.bits() & (kind == Code::kUint4 ? 15 : 255)));
    }
  }
  double weight(int64_t n, int64_t k) const {
    const int64_t at = (n / 16 * groups + k / group) * 16 + n % 16;
    const double value = code == Code::kFloat8E4m3
                             ? byte_number(CacheFormat::kFloat8E4m3, values[n * inputs + k])
                             : values[n * inputs + k];
    const double middle = code == Code::kUint4 ? 8 : code == Code::kUint8 ? 128 : 0;
    return (value - (zeros.empty() ? middle : zeros[at])) * scales[at];
  }
  QuantizedLinearArgs args(DType dtype) const {
    QuantizedLinearArgs a{};
    a.dtype = dtype;
    a.codes = packed.data();
    a.scales = scales.data();
    a.zeros = zeros.empty() ? nullptr : zeros.data();
    a.in_features = inputs;
    a.out_features = outputs;
    a.group_size = group;
    a.scale_dtype = DType::kFloat32;
    a.code = code;
    return a;
  }
  // Of a row whose elements are wrong by some amounts; blocks of inputs may be rounded to multiples of a scale.
  Dot product(const std::vector<double>& x, const std::vector<double>& off, int64_t n, bool is_single,
              bool rounds_inputs) const {
    Dot sum;
    const int64_t block = rounds_inputs ? 32 : 128;
    for (int64_t begin = 0; begin < inputs;) {
      const int64_t end =
          std::min({inputs, (begin / group + 1) * group, begin + block - begin % group % block});
      double largest = 0.0;
      for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::abs(x[k]) + off[k]);
      const bool are_whole = rounds_inputs || (!is_single && code != Code::kFloat8E4m3);
      // AMX rounds bfloat16 inputs not at all, others to 16 bits
      const double step = are_whole ? 0.501 * largest / (rounds_inputs ? 127 : 32767) : 0.0;
      for (int64_t k = begin; k < end; ++k)
        sum.add(x[k], weight(n, k), (off[k] + step) * std::abs(weight(n, k)));
      begin = end;
    }
    return sum;
  }
};

ASCEND_VLLM_CHECK(pack_codes) {
  for (const int bits : {4, 8}) {
    const int64_t rows = 21, inputs = 37, words = (inputs * bits + 31) / 32, first = 5;
    Random random(bits);
    std::vector<uint8_t> values;
    for (int64_t i = 0; i < rows * inputs; ++i) values.push_back(static_cast<uint8_t>(random.below(1 << bits)));
    std::vector<uint32_t> codes(2 * words * 16);
    pack_codes_kernel({values.data(), codes.data(), first, rows, inputs, inputs, words, bits});
    Case own("pack_codes", std::to_string(bits));
    for (int64_t i = 0; i < rows * inputs; ++i) {
      const int64_t n = first + i / inputs, k = i % inputs, each = 32 / bits;
      const uint32_t word = codes[(n / 16 * words + k / each) * 16 + n % 16];
      const int64_t shift = bits * (k % each / 2) + 16 * (k % 2);
      own.equal(word >> shift & ((1u << bits) - 1), values[i], i);
    }
  }
}

ASCEND_VLLM_CHECK(quantize_tokens) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const TokenScale kind : {TokenScale::kSymmetric, TokenScale::kOffset, TokenScale::kStatic}) {
      const int64_t rows = 4, width = 77;
      Random random(8);
      const auto x = numbers<T>(random, rows * width, 3.0);
      std::vector<int8_t> q(rows * width);
      std::vector<float> scales(rows);
      std::vector<int32_t> offsets(rows);
      quantize_tokens_kernel(
          {kDType<T>, x.data(), q.data(), scales.data(), offsets.data(), rows, width, width, kind, 0.05f, -3});
      Case own("quantize_tokens", shape_of<T>({static_cast<int64_t>(kind)}));
      for (int64_t t = 0; t < rows; ++t) {
        double high = 0.0, low = 0.0;
        for (int64_t i = 0; i < width; ++i) {
          high = std::max<double>(high, to_float(x[t * width + i]));
          low = std::min<double>(low, to_float(x[t * width + i]));
        }
        const double scale = kind == TokenScale::kSymmetric ? std::max(high, -low) / 127
                             : kind == TokenScale::kOffset  ? (high - low) / 255
                                                            : static_cast<double>(0.05f);
        const double offset = kind == TokenScale::kSymmetric ? 0.0
                              : kind == TokenScale::kOffset  ? std::nearbyint(-128.0 - low / scale)
                                                             : -3.0;
        own.near(scales[t], scale, 1e-6 * scale, t);
        own.equal(offsets[t], offset, t);
        for (int64_t i = 0; i < width; ++i) {
          const double exact = std::clamp(to_float(x[t * width + i]) / scale + offset, -128.0, 127.0);
          own.near(static_cast<float>(q[t * width + i]), exact, 0.5001, t * width + i);
        }
      }
    }
  });
}

ASCEND_VLLM_CHECK(quantized_linear) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const Code code : {Code::kUint4, Code::kUint8, Code::kFloat8E4m3}) {
      // outputs, inputs, inputs of a group
      for (const auto& [outputs, inputs, group] :
           {std::tuple<int64_t, int64_t, int64_t>{33, 70, 32}, {64, 300, 300}, {16, 7, 7}, {96, 256, 128}}) {
        Random random(outputs);
        const bool is_float8 = code == Code::kFloat8E4m3;
        const Codes weight(random, code, outputs, inputs, group, !is_float8 && outputs != 64);
        const auto bias = numbers<float>(random, outputs);
        for (const int64_t rows : {1, 3, 19}) {
          for (const bool rounds_inputs : {false, true}) {
            if (rounds_inputs && is_float8) continue;
            const bool is_gated = outputs % 32 == 0 && rows == 3;
            const int64_t width = is_gated ? outputs / 2 : outputs;
            const auto x = numbers<T>(random, rows * inputs);
            std::vector<T> out(rows * width);
            QuantizedLinearArgs args = weight.args(kDType<T>);
            args.x = x.data();
            args.x_stride = inputs;
            args.rows = rows;
            args.bias = bias.data();
            args.out = out.data();
            args.is_gated = is_gated;
            args.gate = Gate::kSilu;
            args.rounds_inputs = rounds_inputs;
            std::vector<char> workspace(QuantizedInputs(args).bytes + 64);
            args.workspace =
                reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
            quantized_linear_kernel(args);
            Case own("quantized_linear", shape_of<T>({static_cast<int64_t>(code), rows, inputs, outputs, group,
                                                      is_gated, rounds_inputs}));
            const std::vector<double> exact(inputs);
            for (int64_t i = 0; i < rows * width; ++i) {
              std::vector<double> row;
              for (int64_t k = 0; k < inputs; ++k) row.push_back(to_float(x[i / width * inputs + k]));
              const auto product = [&](int64_t n) {
                Dot sum = weight.product(row, exact, n, kDType<T> == DType::kFloat32, rounds_inputs);
                sum.add(bias[n], 1.0);
                return sum;
              };
              const Dot sum = product(i % width);
              if (is_gated) {
                const Gated want = gated<T>(Gate::kSilu, sum, product(i % width + width));
                own.near(out[i], want.value, want.slack, i);
              } else {
                own.near(out[i], sum.value, sum.slack(), i);
              }
            }
          }
        }
      }
    }
  });
}

// 8-bit weights [outputs, inputs] in codes, which are 128 larger, with a scale of each output.
struct Int8Weight {
  int64_t outputs, inputs;
  std::vector<int8_t> values;
  std::vector<uint32_t> packed;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  Int8Weight(Random& random, int64_t n, int64_t k)
      : outputs(n), inputs(k), packed((n + 15) / 16 * ((k + 3) / 4) * 16) {
    std::vector<uint8_t> codes;
    for (int64_t i = 0; i < n * k; ++i) {
      codes.push_back(static_cast<uint8_t>(random.bits()));
      values.push_back(static_cast<int8_t>(codes.back() - 128));
    }
    pack_codes_kernel({codes.data(), packed.data(), 0, n, k, k, (k + 3) / 4, 8});
    scales.resize((n + 15) / 16 * 16);
    sums.resize(scales.size());
    for (int64_t i = 0; i < n; ++i) {
      scales[i] = static_cast<float>(0.003 + 0.001 * random.number());
      for (int64_t j = 0; j < k; ++j) sums[i] += values[i * k + j];
    }
  }
  Int8LinearArgs args(DType dtype) const {
    Int8LinearArgs a{};
    a.dtype = dtype;
    a.codes = packed.data();
    a.scales = scales.data();
    a.in_features = inputs;
    a.out_features = outputs;
    return a;
  }
};

ASCEND_VLLM_CHECK(int8_linear) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{17, 5}, {64, 300}, {96, 1030}}) {
      Random random(outputs);
      const Int8Weight weight(random, outputs, inputs);
      const auto bias = numbers<float>(random, outputs);
      for (const int64_t rows : {1, 2, 7, 33}) {
        std::vector<int8_t> q;
        std::vector<float> scales;
        std::vector<int32_t> offsets;
        for (int64_t i = 0; i < rows * inputs; ++i) q.push_back(static_cast<int8_t>(random.bits()));
        for (int64_t r = 0; r < rows; ++r) {
          scales.push_back(static_cast<float>(0.02 + 0.01 * random.number()));
          offsets.push_back(static_cast<int32_t>(random.below(256) - 128));
        }
        std::vector<T> out(rows * outputs);
        std::vector<char> workspace(int8_workspace(rows, inputs) + 64);
        Int8LinearArgs args = weight.args(kDType<T>);
        args.q = q.data();
        args.q_scales = scales.data();
        const bool has_offsets = rows % 2 == 1;
        if (has_offsets) {
          args.q_offsets = offsets.data();
          args.sums = weight.sums.data();
        }
        args.bias = bias.data();
        args.out = out.data();
        args.workspace =
            reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
        args.rows = rows;
        int8_linear_kernel(args);
        Case own("int8_linear", shape_of<T>({rows, inputs, outputs}));
        for (int64_t i = 0; i < rows * outputs; ++i) {
          const int64_t r = i / outputs, n = i % outputs;
          int64_t whole = 0;
          for (int64_t k = 0; k < inputs; ++k) {
            whole += (q[r * inputs + k] - (has_offsets ? offsets[r] : 0)) * weight.values[n * inputs + k];
          }
          const double product = static_cast<double>(whole) * scales[r] * weight.scales[n];
          own.near(out[i], product + bias[n], 0x1p-21 * (std::abs(product) + std::abs(bias[n])), i);
        }
      }
    }
  });
}

// Experts of whose two weights `multiply(expert, is_down, row, off, n)` gives the products.
template <class T, class Args, class Product>
void check_experts(const char* kernel, Args args, void (*run)(const Args&), int64_t tokens,
                   const Product& multiply) {
  const int64_t hidden = args.gate_up.linear.in_features, inner = args.inner, experts = args.num_experts;
  Random random(tokens);
  const auto x = numbers<T>(random, tokens * hidden), shared = numbers<T>(random, tokens * hidden);
  const auto shared_gate = numbers<T>(random, tokens);
  const Choices chosen(random, tokens, 2, experts);
  std::vector<T> out(tokens * hidden);
  chosen.fill(args, x, shared, shared_gate, out, hidden);
  args.gate_up.linear.is_gated = true;
  args.gate_up.linear.gate = Gate::kSilu;
  std::vector<char> workspace(StackedExpertsMemory(args).bytes + 64);
  args.workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  run(args);
  Case own(kernel, shape_of<T>({tokens}));
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<Dot> sums = chosen.shared_results(shared, shared_gate, t, hidden);
    std::vector<double> row;
    for (int64_t k = 0; k < hidden; ++k) row.push_back(to_float(x[t * hidden + k]));
    for (int64_t c = 0; c < 2; ++c) {
      const int64_t e = chosen.ids[t * 2 + c];
      if (e >= experts) continue;
      std::vector<double> middle(inner), off(inner);
      for (int64_t i = 0; i < inner; ++i) {
        const std::vector<double> exact(hidden);
        const Gated value =
            gated<T>(Gate::kSilu, multiply(e, false, row, exact, i), multiply(e, false, row, exact, inner + i));
        middle[i] = value.value;
        off[i] = value.slack + kRounding<T> * std::abs(value.value);
      }
      const double weight = chosen.weights[t * 2 + c];
      for (int64_t n = 0; n < hidden; ++n) {
        // a result of an expert is rounded before it is added
        const Dot sum = multiply(e, true, middle, off, n);
        sums[n].add(
            sum.value, weight,
            (sum.slack() + 1.01 * kRounding<T> * (std::abs(sum.value) + sum.slack())) * std::abs(weight));
      }
    }
    for (int64_t n = 0; n < hidden; ++n)
      own.near(out[t * hidden + n], sums[n].value, sums[n].slack(), t * hidden + n);
  }
}

constexpr int64_t kExperts = 4, kHidden = 64, kInner = 32;

// The parts of the experts' weights, one after the other.
template <class Weight, class Part>
auto stacked(const std::vector<Weight>& weights, Part Weight::* part) {
  Part all;
  for (const Weight& weight : weights) all.insert(all.end(), (weight.*part).begin(), (weight.*part).end());
  return all;
}

ASCEND_VLLM_CHECK(quantized_experts) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const bool rounds_inputs : {false, true}) {
      for (const int64_t tokens : {1, 9}) {
        Random random(3);
        std::vector<Codes> weights[2];
        for (int64_t e = 0; e < kExperts; ++e) {
          weights[0].emplace_back(random, Code::kUint4, 2 * kInner, kHidden, 32, true);
          weights[1].emplace_back(random, Code::kUint4, kHidden, kInner, 16, true);
        }
        std::vector<uint32_t> codes[2];
        std::vector<float> scales[2];
        std::vector<uint8_t> zeros[2];
        QuantizedExpertsArgs args{};
        args.inner = kInner;
        args.num_experts = kExperts;
        for (int i = 0; i < 2; ++i) {
          codes[i] = stacked(weights[i], &Codes::packed);
          scales[i] = stacked(weights[i], &Codes::scales);
          zeros[i] = stacked(weights[i], &Codes::zeros);
          QuantizedStack& stack = i == 0 ? args.gate_up : args.down;
          stack.linear = weights[i][0].args(kDType<T>);
          stack.linear.rounds_inputs = rounds_inputs;
          stack.linear.codes = codes[i].data();
          stack.linear.scales = scales[i].data();
          stack.linear.zeros = zeros[i].data();
          stack.codes = static_cast<int64_t>(weights[i][0].packed.size());
          stack.scales = static_cast<int64_t>(4 * weights[i][0].scales.size());
          stack.zeros = static_cast<int64_t>(weights[i][0].zeros.size());
        }
        check_experts<T>("quantized_experts", args, quantized_experts_kernel, tokens,
                         [&](int64_t e, bool is_down, const std::vector<double>& x,
                             const std::vector<double>& off, int64_t n) {
                           return weights[is_down][e].product(x, off, n, kDType<T> == DType::kFloat32,
                                                              rounds_inputs);
                         });
      }
    }
  });
}

ASCEND_VLLM_CHECK(int8_experts) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t tokens : {1, 9}) {
      Random random(6);
      std::vector<Int8Weight> weights[2];
      for (int64_t e = 0; e < kExperts; ++e) {
        weights[0].emplace_back(random, 2 * kInner, kHidden);
        weights[1].emplace_back(random, kHidden, kInner);
      }
      std::vector<uint32_t> codes[2];
      std::vector<float> scales[2];
      Int8ExpertsArgs args{};
      args.inner = kInner;
      args.num_experts = kExperts;
      for (int i = 0; i < 2; ++i) {
        codes[i] = stacked(weights[i], &Int8Weight::packed);
        scales[i] = stacked(weights[i], &Int8Weight::scales);
        Int8Stack& stack = i == 0 ? args.gate_up : args.down;
        stack.linear = weights[i][0].args(kDType<T>);
        stack.linear.codes = codes[i].data();
        stack.linear.scales = scales[i].data();
        stack.codes = static_cast<int64_t>(weights[i][0].packed.size());
        stack.scales = static_cast<int64_t>(weights[i][0].scales.size());
      }
      check_experts<T>("int8_experts", args, int8_experts_kernel, tokens,
                       [&](int64_t e, bool is_down, const std::vector<double>& x,
                           const std::vector<double>& off, int64_t n) {
                         const Int8Weight& weight = weights[is_down][e];
                         double largest = 0.0;
                         for (size_t k = 0; k < x.size(); ++k)
                           largest = std::max(largest, std::abs(x[k]) + off[k]);
                         Dot sum;
                         for (size_t k = 0; k < x.size(); ++k) {
                           const double w =
                               weight.values[n * weight.inputs + k] * static_cast<double>(weight.scales[n]);
                           sum.add(x[k], w, (off[k] + 0.501 * largest / 127) * std::abs(w));
                         }
                         return sum;
                       });
    }
  });
}

}  // namespace
}  // namespace ascend_vllm::check

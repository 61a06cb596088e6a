// Kernels of single rows: activations, norms, rotary embeddings, copies.
#include <algorithm>

#include "cpu/check/check.h"
#include "cpu/check/plain.h"
#include "cpu/kernels/activation.h"
#include "cpu/kernels/columns.h"
#include "cpu/kernels/gather_rows.h"
#include "cpu/kernels/latent_store.h"
#include "cpu/kernels/norm.h"
#include "cpu/kernels/paged_store.h"
#include "cpu/kernels/rotary.h"
#include "cpu/kernels/widen.h"

namespace ascend_vllm::check {
namespace {

constexpr int64_t kWidths[] = {1, 3, 7, 16, 33, 100, 257};
constexpr double kSingle = 0x1p-24;

ASCEND_VLLM_CHECK(gate_and_mul) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const Gate gate : {Gate::kSilu, Gate::kGelu, Gate::kGeluTanh}) {
      for (const int64_t width : kWidths) {
        const int64_t rows = 5, stride = 2 * width + 3;
        Random random(width);
        const auto x = numbers<T>(random, rows * stride, 6.0);
        std::vector<T> out(rows * width);
        gate_and_mul_kernel({kDType<T>, gate, x.data(), out.data(), rows, stride, width});
        Case own("gate_and_mul", shape_of<T>({static_cast<int64_t>(gate), rows, width}));
        for (int64_t i = 0; i < rows * width; ++i) {
          const T* row = x.data() + i / width * stride;
          const double up = to_float(row[width + i % width]), a = to_float(row[i % width]);
          own.near(out[i], activate(gate, a) * up, gate_slack<T>(a) * std::abs(up), i);
        }
      }
    }
  });
}

// 1 / sqrt of the mean of squares.
template <class T>
double inverse_rms(const T* x, int64_t width, double epsilon) {
  double squares = 0.0;
  for (int64_t i = 0; i < width; ++i) squares += std::pow(to_float(x[i]), 2);
  return 1.0 / std::sqrt(squares / static_cast<double>(width) + epsilon);
}

ASCEND_VLLM_CHECK(rms_norm) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t width : kWidths) {
      const int64_t outer = 3, inner = 2, stride = width + 1;
      Random random(width);
      const auto x = numbers<T>(random, outer * inner * stride, 3.0), weight = numbers<T>(random, width);
      std::vector<T> out(outer * inner * width);
      rms_norm_kernel({kDType<T>, x.data(), out.data(), weight.data(), nullptr, outer, inner, inner * stride,
                       stride, width, 1e-5f});
      Case own("rms_norm", shape_of<T>({outer, inner, width}));
      for (int64_t r = 0; r < outer * inner; ++r) {
        const double factor = inverse_rms(x.data() + r * stride, width, 1e-5);
        for (int64_t i = 0; i < width; ++i) {
          // the normalised number is rounded before it is multiplied by the weight
          const double normal = to_float(x[r * stride + i]) * factor, w = to_float(weight[i]);
          own.near(out[r * width + i], normal * w, (8 * kSingle + kRounding<T>)*std::abs(normal * w),
                   r * width + i);
        }
      }
    }
  });
}

ASCEND_VLLM_CHECK(fused_add_rms_norm) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t width : kWidths) {
      const int64_t rows = 4, stride = width + 2;
      Random random(width);
      auto x = numbers<T>(random, rows * stride), residual = numbers<T>(random, rows * stride, 3.0);
      const auto weight = numbers<T>(random, width);
      std::vector<T> sums(rows * stride);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
      fused_add_rms_norm_kernel(
          {kDType<T>, x.data(), residual.data(), weight.data(), rows, stride, stride, width, 1e-5f});
      Case own("fused_add_rms_norm", shape_of<T>({rows, width}));
      for (int64_t r = 0; r < rows; ++r) {
        const double factor = inverse_rms(sums.data() + r * stride, width, 1e-5);
        for (int64_t i = 0; i < width; ++i) {
          const int64_t at = r * stride + i;
          own.equal(to_float(residual[at]), to_float(sums[at]), at);
          const double normal = to_float(sums[at]) * factor, w = to_float(weight[i]);
          own.near(x[at], normal * w, (8 * kSingle + kRounding<T>)*std::abs(normal * w), at);
        }
      }
    }
  });
}

ASCEND_VLLM_CHECK(add_rows) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t width : kWidths) {
      const int64_t rows = 4, x_stride = width + 2, y_stride = width + 5;
      Random random(width);
      const auto x = numbers<T>(random, rows * x_stride), y = numbers<T>(random, rows * y_stride, 3.0);
      std::vector<T> out(rows * width);
      add_rows_kernel({kDType<T>, x.data(), y.data(), out.data(), rows, x_stride, y_stride, width});
      Case own("add_rows", shape_of<T>({rows, width}));
      for (int64_t i = 0; i < rows * width; ++i) {
        const int64_t r = i / width, c = i % width;
        const float sum = to_float(x[r * x_stride + c]) + to_float(y[r * y_stride + c]);
        own.equal(to_float(out[i]), to_float(from_float<T>(sum)), i);
      }
    }
  });
}

ASCEND_VLLM_CHECK(copy_rows) {
  for (const int64_t width : kWidths) {
    const int64_t rows = 4, stride = width + 3, out_stride = width + 1;
    std::vector<char> x(rows * stride), out(rows * out_stride, 'x');
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<char>(i % 101);
    copy_rows_kernel({x.data(), out.data(), rows, stride, out_stride, width});
    Case own("copy_rows", "bytes " + std::to_string(width));
    for (int64_t i = 0; i < rows * out_stride; ++i) {
      const int64_t r = i / out_stride, c = i % out_stride;
      own.equal(out[i], c < width ? x[r * stride + c] : 'x', i);
    }
  }
}

ASCEND_VLLM_CHECK(layer_norm) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t width : kWidths) {
      const int64_t rows = 3;
      Random random(width);
      const auto x = numbers<T>(random, rows * width, 2.0), weight = numbers<T>(random, width);
      const auto bias = numbers<T>(random, width);
      std::vector<T> out(rows * width);
      layer_norm_kernel(
          {kDType<T>, x.data(), out.data(), weight.data(), bias.data(), rows, 1, width, 0, width, 1e-3f});
      Case own("layer_norm", shape_of<T>({rows, width}));
      for (int64_t r = 0; r < rows; ++r) {
        double mean = 0.0, squares = 0.0;
        for (int64_t i = 0; i < width; ++i) mean += to_float(x[r * width + i]) / static_cast<double>(width);
        for (int64_t i = 0; i < width; ++i) squares += std::pow(to_float(x[r * width + i]) - mean, 2);
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-3);
        for (int64_t i = 0; i < width; ++i) {
          const double w = to_float(weight[i]), normal = (to_float(x[r * width + i]) - mean) * factor;
          const double slack = 32 * kSingle * (std::abs(normal * w) + 4.0 * factor);
          own.near(out[r * width + i], normal * w + to_float(bias[i]), slack, r * width + i);
        }
      }
    }
  });
}

ASCEND_VLLM_CHECK(widen) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t width : kWidths) {
      Random random(width);
      auto x = numbers<T>(random, 3 * (width + 1), 1e-6);
      x[0] = from_float<T>(-__builtin_inff());
      std::vector<float> out(3 * width);
      widen_kernel({kDType<T>, x.data(), out.data(), 3, width + 1, width});
      Case own("widen", shape_of<T>({width}));
      for (int64_t i = 0; i < 3 * width; ++i)
        own.equal(out[i], to_float(x[i / width * (width + 1) + i % width]), i);
    }
  });
}

ASCEND_VLLM_CHECK(gather_rows) {
  for (const int64_t row_bytes : {2, 6, 34, 1000}) {
    const int64_t indices[] = {3, 0, 3, 6};
    std::vector<char> table(7 * row_bytes), out(4 * row_bytes);
    Random random(row_bytes);
    for (char& byte : table) byte = static_cast<char>(random.bits());
    gather_rows_kernel({table.data(), indices, out.data(), 4, row_bytes});
    Case own("gather_rows", std::to_string(row_bytes));
    for (int64_t i = 0; i < 4 * row_bytes; ++i)
      own.equal(out[i], table[indices[i / row_bytes] * row_bytes + i % row_bytes], i);
  }
}

// The cosines and sines of some positions, [positions, rotary].
std::vector<float> cos_sin_table(int64_t positions, int64_t rotary) {
  std::vector<float> table(positions * rotary);
  for (int64_t i = 0; i < positions * rotary; ++i) {
    const int64_t j = i % rotary, half = rotary / 2;
    const double angle =
        static_cast<double>(i / rotary) * std::pow(100.0, -static_cast<double>(j % half) / half);
    table[i] = static_cast<float>(j < half ? std::cos(angle) : std::sin(angle));
  }
  return table;
}

// What element i of a head becomes, and the size of its terms.
template <class T>
std::pair<double, double> rotated(const T* x, const float* cos_sin, int64_t rotary, bool is_neox, int64_t i) {
  if (i >= rotary) return {to_float(x[i]), 0.0};
  const int64_t half = rotary / 2, pair = is_neox ? i % half : i / 2;
  const bool is_second = is_neox ? i >= half : i % 2 == 1;
  const double a = to_float(x[is_neox ? pair : 2 * pair]),
               b = to_float(x[is_neox ? pair + half : 2 * pair + 1]);
  const double c = cos_sin[pair], s = cos_sin[half + pair];
  return {is_second ? b * c + a * s : a * c - b * s, std::abs(a) + std::abs(b)};
}

ASCEND_VLLM_CHECK(rotary_embedding) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const auto& [head_size, rotary] : {std::pair<int64_t, int64_t>{64, 64}, {40, 20}, {128, 96}, {6, 2}}) {
      for (const bool is_neox : {true, false}) {
        const int64_t tokens = 5, heads[] = {3, 2}, positions[] = {4, 0, 9, 1, 9};
        Random random(head_size);
        const auto table = cos_sin_table(10, rotary);
        std::vector<T> rows[2];
        for (int i = 0; i < 2; ++i) rows[i] = numbers<T>(random, tokens * (heads[i] * head_size + 8));
        const std::vector<T> before[2] = {rows[0], rows[1]};
        rotary_embedding_kernel({kDType<T>,
                                 positions,
                                 {rows[0].data(), rows[1].data()},
                                 {heads[0] * head_size + 8, heads[1] * head_size + 8},
                                 {heads[0], heads[1]},
                                 table.data(),
                                 tokens,
                                 head_size,
                                 rotary,
                                 is_neox});
        Case own("rotary_embedding", shape_of<T>({head_size, rotary, is_neox}));
        for (int k = 0; k < 2; ++k) {
          const int64_t stride = heads[k] * head_size + 8;
          for (int64_t at = 0; at < tokens * heads[k] * head_size; ++at) {
            const int64_t t = at / (heads[k] * head_size), head = at / head_size % heads[k];
            const int64_t start = t * stride + head * head_size;
            const auto [want, size] = rotated(before[k].data() + start, table.data() + positions[t] * rotary,
                                              rotary, is_neox, at % head_size);
            own.near(rows[k][start + at % head_size], want, 4 * kSingle * size, at);
          }
        }
      }
    }
  });
}

// Keys and values in blocks of 4 slots, of which each is written by one token, or by none.
template <class T>
struct Stored {
  static constexpr int64_t kTokens = 6, kHeads = 2, kBlock = 4, kBlocks = 3;
  int64_t head_size;
  std::vector<T> key, value, key_cache, value_cache;
  std::vector<int64_t> slots = {5, 0, -1, 11, 2, 7};

  Stored(int64_t size, uint64_t seed) : head_size(size) {
    Random random(seed);
    key = numbers<T>(random, kTokens * kHeads * size);
    value = numbers<T>(random, kTokens * kHeads * size);
    key_cache = value_cache = numbers<T>(random, kBlocks * kHeads * kBlock * size);
  }
  PagedCache cache() {
    return {CacheFormat::kSame,
            kHeads,
            kBlock,
            head_size,
            key_cache.data(),
            value_cache.data(),
            kBlock * head_size,
            nullptr,
            nullptr,
            0,
            1.0f,
            1.0f};
  }
  // Where the cache has element d of a head of a token.
  int64_t place(int64_t t, int64_t head, int64_t d) const {
    return ((slots[t] / kBlock * kHeads + head) * kBlock + slots[t] % kBlock) * head_size + d;
  }
};

ASCEND_VLLM_CHECK(store_kv) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t size : {8, 24, 128}) {
      Stored<T> stored(size, size);
      const auto keys_before = stored.key_cache;
      const int64_t stride = Stored<T>::kHeads * size;
      store_kv_kernel({kDType<T>, stored.key.data(), stored.value.data(), stored.cache(), stored.slots.data(),
                       Stored<T>::kTokens, stride, size, stride, size});
      auto keys = keys_before, values = keys_before;
      for (int64_t i = 0; i < Stored<T>::kTokens * stride; ++i) {
        if (stored.slots[i / stride] < 0) continue;
        const int64_t at = stored.place(i / stride, i / size % Stored<T>::kHeads, i % size);
        keys[at] = stored.key[i];
        values[at] = stored.value[i];
      }
      Case own("store_kv", shape_of<T>({size}));
      for (size_t i = 0; i < keys.size(); ++i) {
        own.equal(to_float(stored.key_cache[i]), to_float(keys[i]), i);
        own.equal(to_float(stored.value_cache[i]), to_float(values[i]), i);
      }
    }
    for (const CacheFormat format : {CacheFormat::kInt8, CacheFormat::kFloat8E4m3, CacheFormat::kFloat8E5m2}) {
      const int64_t size = 24, slots = Stored<T>::kBlocks * Stored<T>::kBlock,
                    stride = Stored<T>::kHeads * size;
      Stored<T> stored(size, 7);
      std::vector<uint8_t> keys(slots * stride), values(slots * stride);
      std::vector<bfloat16> key_scales(slots * Stored<T>::kHeads), value_scales(key_scales.size());
      PagedCache cache = stored.cache();
      cache.format = format;
      cache.keys = keys.data();
      cache.values = values.data();
      cache.key_scales = key_scales.data();
      cache.value_scales = value_scales.data();
      cache.scale_head_stride = Stored<T>::kBlock;
      store_kv_kernel({kDType<T>, stored.key.data(), stored.value.data(), cache, stored.slots.data(),
                       Stored<T>::kTokens, stride, size, stride, size});
      Case own("store_kv", shape_of<T>({static_cast<int64_t>(format), size}));
      for (int64_t i = 0; i < Stored<T>::kTokens * stride; ++i) {
        if (stored.slots[i / stride] < 0) continue;
        const int64_t at = stored.place(i / stride, i / size % Stored<T>::kHeads, i % size);
        const float scale = to_float(key_scales[at / size]), wide = to_float(stored.key[i]);
        const float got = byte_number(format, keys[at]) * scale;
        // half a step, which is relative for floats, and some rounding of the division
        const double step = format == CacheFormat::kInt8 ? 0.5 * scale
                            : format == CacheFormat::kFloat8E4m3
                                ? std::max(std::abs(wide) * 0x1p-4, 0x1p-10 * scale)
                                : std::max(std::abs(wide) * 0x1p-3, 0x1p-17 * scale);
        own.near(got, wide, 1.001 * step, i);
      }
    }
  });
}

ASCEND_VLLM_CHECK(rotary_store_kv) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const bool is_neox : {true, false}) {
      const int64_t size = 40, rotary = 24, stride = Stored<T>::kHeads * size, tokens = Stored<T>::kTokens;
      Stored<T> stored(size, 3);
      Random random(4);
      auto query = numbers<T>(random, tokens * 4 * size);
      const auto before = query;
      const auto table = cos_sin_table(8, rotary);
      const int64_t positions[] = {0, 7, 3, 3, 1, 5};
      rotary_store_kv_kernel({{kDType<T>,
                               positions,
                               {query.data(), stored.key.data()},
                               {4 * size, stride},
                               {4, Stored<T>::kHeads},
                               table.data(),
                               tokens,
                               size,
                               rotary,
                               is_neox},
                              stored.value.data(),
                              stride,
                              stored.cache(),
                              stored.slots.data()});
      Case own("rotary_store_kv", shape_of<T>({is_neox}));
      for (int64_t i = 0; i < tokens * 4 * size; ++i) {
        const auto [want, terms] =
            rotated(before.data() + i / size * size, table.data() + positions[i / (4 * size)] * rotary, rotary,
                    is_neox, i % size);
        own.near(query[i], want, 4 * kSingle * terms, i);
      }
      for (int64_t i = 0; i < tokens * stride; ++i) {
        const int64_t t = i / stride;
        if (stored.slots[t] < 0) continue;
        const int64_t at = stored.place(t, i / size % Stored<T>::kHeads, i % size);
        const auto [want, terms] = rotated(stored.key.data() + i / size * size,
                                           table.data() + positions[t] * rotary, rotary, is_neox, i % size);
        own.near(stored.key_cache[at], want, 4 * kSingle * terms, i);
        own.equal(to_float(stored.value_cache[at]), to_float(stored.value[i]), i);
      }
    }
  });
}

// Rows of latents and rotated keys as they are, or rounded to bytes with a scale for each of the two.
template <class T>
void check_store_latent(CacheFormat format, bool is_neox) {
  const int64_t tokens = 4, heads = 3, width = 72, rotary = 24, row = width + rotary, stride = row + 5;
  const int64_t block = 2, block_stride = block * row + 7, scale_stride = 2 * block + 3;
  const bool has_bytes = format != CacheFormat::kSame;
  Random random(11);
  auto query = numbers<T>(random, tokens * heads * rotary), rows = numbers<T>(random, 3 * block_stride);
  std::vector<uint8_t> bytes(rows.size());
  std::vector<bfloat16> scales(3 * scale_stride);
  const auto before = query, latent = numbers<T>(random, tokens * stride, 2.0),
             weight = numbers<T>(random, width);
  const auto table = cos_sin_table(9, rotary);
  const int64_t positions[] = {8, 2, 0, 5}, slots[] = {3, -1, 0, 5};
  const LatentCache cache{format,
                          block,
                          width,
                          row,
                          has_bytes ? static_cast<void*>(bytes.data()) : rows.data(),
                          block_stride,
                          has_bytes ? scales.data() : nullptr,
                          scale_stride,
                          1.0f};
  store_latent_kernel({kDType<T>, positions, query.data(), heads * rotary, rotary, latent.data(), stride,
                       weight.data(), table.data(), cache, slots, tokens, heads, width, rotary, 1e-6f,
                       is_neox});
  Case own("store_latent", shape_of<T>({is_neox, static_cast<int64_t>(format)}));
  for (int64_t i = 0; i < tokens * heads * rotary; ++i) {
    const auto [want, terms] =
        rotated(before.data() + i / rotary * rotary, table.data() + positions[i / (heads * rotary)] * rotary,
                rotary, is_neox, i % rotary);
    own.near(query[i], want, 4 * kSingle * terms, i);
  }
  for (int64_t i = 0; i < tokens * row; ++i) {
    const int64_t t = i / row, d = i % row;
    if (slots[t] < 0) continue;
    const T* x = latent.data() + t * stride;
    double want = 0.0, slack = 0.0;
    if (d < width) {
      want = to_float(x[d]) * inverse_rms(x, width, 1e-6) * to_float(weight[d]);
      slack = (8 * kSingle + kRounding<T>)*std::abs(want);
    } else {
      const auto [value, terms] =
          rotated(x + width, table.data() + positions[t] * rotary, rotary, is_neox, d - width);
      want = value;
      slack = 4 * kSingle * terms;
    }
    const int64_t at = slots[t] / block * block_stride + slots[t] % block * row + d;
    if (!has_bytes) {
      own.near(rows[at], want, slack, i);
      continue;
    }
    // the scale is rounded up, so that no number is cut off: a byte is off by half a step
    const float scale = to_float(scales[slots[t] / block * scale_stride + slots[t] % block * 2 + (d >= width)]);
    own.near(byte_number(format, bytes[at]) * scale, want,
             0.501 * scale + slack + kRounding<T> * std::abs(want), i);
  }
}

ASCEND_VLLM_CHECK(store_latent) {
  for_dtypes([](auto tag) {
    for (const CacheFormat format : {CacheFormat::kSame, CacheFormat::kInt8})
      for (const bool is_neox : {true, false}) check_store_latent<decltype(tag)>(format, is_neox);
  });
}

}  // namespace
}  // namespace ascend_vllm::check

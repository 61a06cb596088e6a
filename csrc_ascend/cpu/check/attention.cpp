// Attention to paged caches of keys and values, and of latents.
#include <algorithm>

#include "cpu/check/check.h"
#include "cpu/check/plain.h"
#include "cpu/kernels/latent_attention.h"
#include "cpu/kernels/latent_expanded.h"
#include "cpu/kernels/latent_plan.h"
#include "cpu/kernels/paged_attention.h"
#include "cpu/kernels/paged_plan.h"

namespace ascend_vllm::check {
namespace {

// Three sequences: one that decodes, a chunk of a prompt after other tokens, a whole prompt.
struct Sequences {
  static constexpr int64_t kCount = 3, kBlockShift = 4, kBlock = 16, kRowBlocks = 45, kBlocks = 64;
  std::vector<int32_t> starts = {0, 1, 8, 28}, lengths = {600, 50, 20}, table;
  int64_t tokens = 28;

  Sequences() {
    // blocks in an order of their own, none of them shared
    for (int32_t s = 0, next = 0; s < kCount; ++s) {
      for (int32_t i = 0; i < kRowBlocks; ++i) {
        table.push_back(i < (lengths[s] + kBlock - 1) / kBlock ? (next++ * 37) % static_cast<int32_t>(kBlocks)
                                                               : 0);
      }
    }
  }
  int64_t sequence_of(int64_t token) const { return token >= starts[2] ? 2 : token >= starts[1] ? 1 : 0; }
  int64_t position_of(int64_t token) const {
    const int64_t s = sequence_of(token);
    return lengths[s] - starts[s + 1] + token;
  }
  // Of a sequence's n-th token: block and offset.
  int64_t slot(int64_t s, int64_t n) const { return table[s * kRowBlocks + n / kBlock] * kBlock + n % kBlock; }
};

// A value that attention weighs, and how far it may be off itself.
struct Value {
  double value;
  double off = 0.0;
};

// Attention of one query row: softmax of scores(n) over keys first … last of values(n, d).
template <class T, class Scores, class Values>
void compare(Case& own, const T* out, int64_t width, int64_t first, int64_t last, const Scores& scores,
             const Values& values, int64_t at) {
  std::vector<double> weights;
  double largest = -1e300, sum = 0.0;
  for (int64_t n = first; n <= last; ++n) weights.push_back(scores(n));
  for (const double score : weights) largest = std::max(largest, score);
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (int64_t d = 0; d < width; ++d) {
    double value = 0.0, size = 0.0, off = 0.0;
    for (int64_t n = first; n <= last; ++n) {
      const double weight = weights[n - first] / sum;
      const Value one = values(n, d);
      value += weight * one.value;
      size += weight * std::abs(one.value);
      off += weight * one.off;
    }
    // weights may be rounded to the type before they are multiplied
    own.near(out[d], value, (kRounding<T> + 64 * 0x1p-24) * size + off, at + d);
  }
}

struct Features {
  int64_t window;
  float soft_cap;
  bool has_slopes;
  CacheFormat format;
};
constexpr Features kFeatures[] = {
    {0, 0.0f, false, CacheFormat::kSame},       {33, 5.0f, false, CacheFormat::kSame},
    {0, 0.0f, true, CacheFormat::kSame},        {0, 0.0f, false, CacheFormat::kInt8},
    {0, 0.0f, false, CacheFormat::kFloat8E4m3}, {0, 0.0f, false, CacheFormat::kFloat8E5m2}};

template <class T>
void check_paged(int64_t heads, int64_t kv_heads, int64_t size, const Features& features, int threads) {
  const Sequences sequences;
  Random random(size);
  const auto query = numbers<T>(random, sequences.tokens * heads * size, 2.0);
  const int64_t count = Sequences::kBlocks * kv_heads * Sequences::kBlock * size;
  auto keys = numbers<T>(random, count), values = numbers<T>(random, count);
  std::vector<uint8_t> key_bytes(count), value_bytes(count);
  const bool has_bytes = features.format != CacheFormat::kSame;
  const double step = features.format == CacheFormat::kInt8 ? 0.01 : 0.1;
  for (int64_t i = 0; has_bytes && i < count; ++i) {
    // whole numbers up to 127, or floats up to about 12, without NaN
    key_bytes[i] =
        static_cast<uint8_t>(random.bits()) & (features.format == CacheFormat::kFloat8E5m2 ? 0xc7 : 0xd7);
    value_bytes[i] =
        static_cast<uint8_t>(random.bits()) & (features.format == CacheFormat::kFloat8E5m2 ? 0xc7 : 0xd7);
  }
  std::vector<float> slopes;
  for (int64_t h = 0; h < heads; ++h) slopes.push_back(0.01f * static_cast<float>(h + 1));
  std::vector<T> out(sequences.tokens * heads * size);
  PagedAttentionArgs args{};
  args.dtype = kDType<T>;
  args.query = query.data();
  args.query_token_stride = heads * size;
  args.query_head_stride = size;
  args.cache = {features.format,
                kv_heads,
                Sequences::kBlock,
                size,
                has_bytes ? static_cast<void*>(key_bytes.data()) : keys.data(),
                has_bytes ? static_cast<void*>(value_bytes.data()) : values.data(),
                Sequences::kBlock * size,
                nullptr,
                nullptr,
                0,
                1.0f,
                has_bytes ? static_cast<float>(step) : 1.0f};
  args.out = out.data();
  args.block_table = sequences.table.data();
  args.block_table_stride = Sequences::kRowBlocks;
  args.query_start = sequences.starts.data();
  args.seq_lens = sequences.lengths.data();
  args.heads = heads;
  args.block_shift = Sequences::kBlockShift;
  args.window = features.window;
  const double scale = 1.0 / std::sqrt(static_cast<double>(size));
  args.scale = static_cast<float>(has_bytes ? scale * step : scale);
  args.soft_cap = features.soft_cap;
  args.slopes = features.has_slopes ? slopes.data() : nullptr;
  args.split_keys = kSplitKeys;
  PagedPlan plan;
  plan.make(args, Sequences::kCount, threads);
  args.items = plan.items.data();
  args.num_items = static_cast<int64_t>(plan.items.size());
  args.merges = plan.merges.data();
  std::vector<float> parts(plan.part_floats);
  args.parts = parts.data();
  args.threads = plan.threads;
  args.scratch_stride = paged_scratch_floats(size) + (has_bytes ? widened_scratch_floats(size) : 0);
  // aligned as the bindings' memory is
  std::vector<float> scratch(args.threads * args.scratch_stride + 16);
  args.scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  paged_attention_kernel(args);
  Case own("paged_attention", shape_of<T>({heads, kv_heads, size, features.window, features.has_slopes,
                                           static_cast<int64_t>(features.format), threads}));
  for (int64_t row = 0; row < sequences.tokens * heads; ++row) {
    const int64_t t = row / heads, h = row % heads, s = sequences.sequence_of(t),
                  last = sequences.position_of(t);
    const auto place = [&](int64_t n) {
      const int64_t slot = sequences.slot(s, n),
                    plane = slot / Sequences::kBlock * kv_heads + h / (heads / kv_heads);
      return (plane * Sequences::kBlock + slot % Sequences::kBlock) * size;
    };
    const auto number = [&](const std::vector<T>& wide, const std::vector<uint8_t>& bytes,
                            int64_t at) -> double {
      return has_bytes ? byte_number(features.format, bytes[at]) * static_cast<double>(static_cast<float>(step))
                       : to_float(wide[at]);
    };
    const int64_t first = features.window > 0 ? std::max<int64_t>(0, last - features.window + 1) : 0;
    compare(
        own, out.data() + row * size, size, first, last,
        [&](int64_t n) {
          double score = 0.0;
          for (int64_t d = 0; d < size; ++d)
            score += to_float(query[row * size + d]) * number(keys, key_bytes, place(n) + d);
          score *= scale;
          if (features.soft_cap > 0.0f) score = features.soft_cap * std::tanh(score / features.soft_cap);
          return features.has_slopes ? score + slopes[h] * static_cast<double>(n - last) : score;
        },
        [&](int64_t n, int64_t d) { return Value{number(values, value_bytes, place(n) + d)}; }, row * size);
  }
}

ASCEND_VLLM_CHECK(paged_attention) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const Features& features : kFeatures) check_paged<T>(6, 2, 64, features, 1);
    check_paged<T>(4, 4, 40, kFeatures[0], 2);
    check_paged<T>(7, 1, 40, kFeatures[1], 1);
    check_paged<T>(8, 1, 128, kFeatures[0], 2);
  });
}

// A cache of latents, and its numbers in T.
template <class T>
struct Latents {
  std::vector<T> rows;
  std::vector<uint8_t> bytes;
  LatentCache cache;

  Latents(Random& random, CacheFormat format, int64_t latent_width, int64_t row_width)
      : rows(numbers<T>(random, Sequences::kBlocks * Sequences::kBlock * row_width)), bytes(rows.size()) {
    const bool has_bytes = format != CacheFormat::kSame;
    const float step = format == CacheFormat::kInt8 ? 0.01f : 0.1f;
    for (size_t i = 0; has_bytes && i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(random.bits()) & 0xd7;
      rows[i] = from_float<T>(byte_number(format, bytes[i]) * step);
    }
    void* const numbers_of_cache = has_bytes ? static_cast<void*>(bytes.data()) : rows.data();
    cache = {format,
             Sequences::kBlock,
             latent_width,
             row_width,
             numbers_of_cache,
             Sequences::kBlock * row_width,
             nullptr,
             0,
             has_bytes ? step : 1.0f};
  }
};

template <class T>
void check_latent(CacheFormat format) {
  for (const int threads : {1, 2}) {
    const Sequences sequences;
    const int64_t heads = 5, width = 88, value_width = 72;
    Random random(threads);
    const auto query = numbers<T>(random, sequences.tokens * heads * width, 2.0);
    const Latents<T> latents(random, format, value_width, width);
    const std::vector<T>& cache = latents.rows;
    std::vector<T> out(sequences.tokens * heads * value_width);
    LatentAttentionArgs args{};
    args.dtype = kDType<T>;
    args.query = query.data();
    args.query_token_stride = heads * width;
    args.query_head_stride = width;
    args.cache = latents.cache;
    args.out = out.data();
    args.block_table = sequences.table.data();
    args.block_table_stride = Sequences::kRowBlocks;
    args.query_start = sequences.starts.data();
    args.seq_lens = sequences.lengths.data();
    args.heads = heads;
    args.width = width;
    args.value_width = value_width;
    args.block_shift = Sequences::kBlockShift;
    args.scale = 0.1f;
    LatentPlan plan;
    plan.make(args, Sequences::kCount, threads);
    args.items = plan.items.data();
    args.num_items = static_cast<int64_t>(plan.items.size());
    args.merges = plan.merges.data();
    std::vector<float> parts(plan.part_floats + 16);
    args.parts = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(parts.data()) + 63) / 64 * 64);
    args.threads = plan.threads;
    args.scratch_stride = latent_scratch_floats(width, value_width) + latent_widened_floats(width);
    std::vector<float> scratch(args.threads * args.scratch_stride + 16);
    args.scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
    latent_attention_kernel(args);
    Case own("latent_attention", shape_of<T>({threads, static_cast<int64_t>(format)}));
    for (int64_t row = 0; row < sequences.tokens * heads; ++row) {
      const int64_t t = row / heads, s = sequences.sequence_of(t);
      compare(
          own, out.data() + row * value_width, value_width, 0, sequences.position_of(t),
          [&](int64_t n) {
            return 0.1 *
                   dot(query.data() + row * width, cache.data() + sequences.slot(s, n) * width, width).value;
          },
          [&](int64_t n, int64_t d) { return Value{to_float(cache[sequences.slot(s, n) * width + d])}; },
          row * value_width);
    }
  }
}

ASCEND_VLLM_CHECK(latent_attention) {
  for_dtypes([](auto tag) {
    for (const CacheFormat format : {CacheFormat::kSame, CacheFormat::kInt8, CacheFormat::kFloat8E4m3}) {
      check_latent<decltype(tag)>(format);
    }
  });
}

template <class T>
void check_expanded(CacheFormat format) {
  const Sequences sequences;
  const int64_t heads = 3, latent = 40, rotary = 8, nope = 24, value_width = 32, width = nope + rotary;
  const int64_t row_width = latent + rotary, longest = 600;
  Random random(9);
  const auto query = numbers<T>(random, sequences.tokens * heads * width, 2.0);
  const Latents<T> latents(random, format, latent, row_width);
  const std::vector<T>& cache = latents.rows;
  std::vector<T> weights[2], packed[2];
  for (int64_t h = 0; h < heads; ++h) {
    for (int i = 0; i < 2; ++i) {
      const int64_t outputs = i == 0 ? nope : value_width;
      const auto weight = numbers<T>(random, outputs * latent, 0.3);
      const Packed<T> panels(weight, outputs, latent);
      weights[i].insert(weights[i].end(), weight.begin(), weight.end());
      packed[i].insert(packed[i].end(), panels.numbers.begin(), panels.numbers.end());
    }
  }
  std::vector<T> out(sequences.tokens * heads * value_width);
  std::vector<T> memory(2 * expanded_rows(longest) * (width + value_width) + 64);
  const int64_t stride = expanded_scratch_floats(latent, width, value_width);
  std::vector<float> scratch(2 * stride + 16);
  ExpandedAttentionArgs args{};
  args.dtype = kDType<T>;
  args.query = query.data();
  args.query_token_stride = heads * width;
  args.query_head_stride = width;
  args.cache = latents.cache;
  args.keys = packed[0].data();
  args.values = packed[1].data();
  args.out = out.data();
  args.block_table = sequences.table.data();
  args.block_table_stride = Sequences::kRowBlocks;
  args.query_start = sequences.starts.data();
  args.seq_lens = sequences.lengths.data();
  args.sequences = Sequences::kCount;
  args.heads = heads;
  args.latent = latent;
  args.rotary = rotary;
  args.nope = nope;
  args.value_width = value_width;
  args.block_shift = Sequences::kBlockShift;
  args.scale = 0.15f;
  args.memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  args.heads_together = 2;
  args.scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  args.scratch_stride = stride;
  args.threads = 2;
  expanded_attention_kernel(args);
  Case own("expanded_attention", shape_of<T>({static_cast<int64_t>(format)}));
  // keys and values are rounded to the type when they are computed
  const auto expanded = [&](int i, int64_t h, int64_t s, int64_t n, int64_t d) -> Value {
    const int64_t outputs = i == 0 ? nope : value_width;
    const T* row = cache.data() + sequences.slot(s, n) * row_width;
    const Dot sum = dot(row, weights[i].data() + (h * outputs + d) * latent, latent);
    return {to_float(from_float<T>(static_cast<float>(sum.value))), sum.slack()};
  };
  for (int64_t row = 0; row < sequences.tokens * heads; ++row) {
    const int64_t t = row / heads, h = row % heads, s = sequences.sequence_of(t);
    if (s == 0 && h > 0) continue;  // the long row takes the reference long
    compare(
        own, out.data() + row * value_width, value_width, 0, sequences.position_of(t),
        [&](int64_t n) {
          double score = 0.0;
          for (int64_t d = 0; d < width; ++d) {
            const double key = d < nope ? expanded(0, h, s, n, d).value
                                        : to_float(cache[sequences.slot(s, n) * row_width + latent + d - nope]);
            score += to_float(query[row * width + d]) * key;
          }
          return score * static_cast<double>(0.15f);
        },
        [&](int64_t n, int64_t d) { return expanded(1, h, s, n, d); }, row * value_width);
  }
}

ASCEND_VLLM_CHECK(expanded_attention) {
  for_dtypes([](auto tag) {
    for (const CacheFormat format : {CacheFormat::kSame, CacheFormat::kInt8})
      check_expanded<decltype(tag)>(format);
  });
}

}  // namespace
}  // namespace ascend_vllm::check

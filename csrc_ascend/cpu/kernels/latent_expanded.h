// Causal attention of sequences with many query tokens to a paged cache of latents: keys and values of some
// heads are computed first, by the tasks of gemm_tasks.h, into memory that stays in the caches, and then
// attended to.
#pragma once

#include "cpu/kernels/gemm_tasks.h"
#include "cpu/kernels/latent_cache.h"

namespace ascend_vllm {

struct ExpandedAttentionArgs {
  DType dtype;
  const void* query;  // token t, head n starts at t * query_token_stride + n * query_head_stride elements
  int64_t query_token_stride, query_head_stride;
  LatentCache cache;
  const void* keys;    // weights [nope, latent] of the heads, each as that of packed_linear
  const void* values;  // [value_width, latent]
  void* out;           // [tokens, heads, value_width]
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t sequences, heads, latent, rotary, nope, value_width;
  int block_shift;
  float scale;
  char* memory;            // keys and values of heads_together heads, see expanded_rows()
  int64_t heads_together;  // whose keys and values are computed at a time
  // one region of scratch_stride floats per thread, expanded_scratch_floats() of them used
  float* scratch;
  int64_t scratch_stride;
  int threads;
};

// Rows of memory for the keys of a head, and for the values: keys are read in groups.
constexpr int64_t expanded_rows(int64_t keys) { return (keys + 15) / 16 * 16; }
constexpr int64_t expanded_scratch_floats(int64_t latent, int64_t key_width, int64_t value_width) {
  const int64_t attending = 224 * key_width + 16384 + 128 * ((value_width + 31) / 32 * 32 + 2),
                expanding = 192 * latent;
  return attending > expanding ? attending : expanding;
}

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const ExpandedAttentionArgs& args) { return choice_of(args.dtype, kAttention); }
#endif

ASCEND_VLLM_KERNEL(expanded_attention, ExpandedAttentionArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/latent_lanes.h"
#ifdef __AMX_BF16__
#include "cpu/kernels/latent_tiles.h"
#endif
#include "cpu/kernels/latent_widen.h"

namespace ascend_vllm {
namespace {

template <class T>
constexpr bool fits_scratch(int64_t width) {
  return LatentFormOf<T>::type::scratch_floats(width) <= 224 * width + 16384;
}
static_assert(fits_scratch<float>(8) && fits_scratch<float>(4096));
static_assert(fits_scratch<bfloat16>(8) && fits_scratch<bfloat16>(4096));

// One sequence.
template <class T>
class ExpandedAttention {
  using X = typename InputOf<T>::type;
  using Form = typename LatentFormOf<T>::type;

 public:
  ExpandedAttention(const ExpandedAttentionArgs& args, int64_t sequence)
      : a_(args),
        first_token_(args.query_start[sequence]),
        tokens_(args.query_start[sequence + 1] - first_token_),
        length_(args.seq_lens[sequence]),
        key_width_(args.nope + args.rotary),
        cache_{static_cast<const T*>(args.cache.rows),
               nullptr,
               args.latent + args.rotary,
               0,
               0,
               args.block_table + sequence * args.block_table_stride,
               args.block_shift},
        keys_(reinterpret_cast<T*>(args.memory)),
        values_(keys_ + args.heads_together * expanded_rows(length_) * key_width_) {}

  void run() {
    for (int64_t head = 0; head < a_.heads; head += a_.heads_together) {
      run_heads(head, min_of(a_.heads_together, a_.heads - head));
    }
  }

 private:
  void run_heads(int64_t first, int64_t heads) {
    // smaller parts if there would be too few to balance the threads
    int64_t block = kTaskRows, tile = Form::kMostRows;
    const int64_t wanted = a_.threads == 1 ? 1 : 8 * a_.threads;
    while (block > 24 && heads * parts_of(length_, block) < wanted) block /= 2;
    while (tile > kPanelLanes && heads * parts_of(tokens_, tile) < wanted) tile /= 2;
    const int64_t blocks = parts_of(length_, block), tiles = parts_of(tokens_, tile);
    for_parts(heads * blocks, [&](int64_t i, float* scratch) {
      const int64_t begin = i / heads * block;
      expand(first, i % heads, begin, min_of(begin + block, length_), reinterpret_cast<X*>(scratch));
    });
    // the last tokens see the most keys, so they come first
    for_parts(heads * tiles, [&](int64_t i, float* scratch) {
      const int64_t begin = (tiles - 1 - i / heads) * tile;
      attend(first, i % heads, begin, min_of(begin + tile, tokens_), scratch);
    });
  }

  static int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

  template <class Part>
  void for_parts(int64_t count, const Part& part) const {
    const auto run = [&](int64_t i, int64_t thread) { part(i, a_.scratch + thread * a_.scratch_stride); };
    if (a_.threads == 1) {
      for (int64_t i = 0; i < count; ++i) run(i, 0);
    } else {
      run_parts(count, a_.threads, run);
    }
  }

  // Keys and values of positions begin … end-1 for head first + `head`.
  void expand(int64_t first, int64_t head, int64_t begin, int64_t end, X* latents) {
    const int64_t rows = expanded_rows(length_);
    T* keys = keys_ + (head * rows + begin) * key_width_;
    const bool is_bytes = a_.cache.format != CacheFormat::kSame;
    alignas(64) T widened[kMaxLatentRow];
    for (int64_t position = begin; position < end; ++position) {
      if (is_bytes) widen_latents(a_.cache, cache_.table, position, position + 1, widened);
      const T* from = is_bytes ? widened : cache_.key(position);
      X* to = latents + (position - begin) * a_.latent;
      for_lanes(
          a_.latent, [&](int64_t i) { store(to + i, load(from + i)); },
          [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest), rest); });
      T* rotary = keys + (position - begin) * key_width_ + a_.nope;
      __builtin_memcpy(rotary, from + a_.latent, a_.rotary * sizeof(T));
    }
    multiply(latents, end - begin, a_.keys, first + head, a_.nope, keys, key_width_);
    multiply(latents, end - begin, a_.values, first + head, a_.value_width,
             values_ + (head * rows + begin) * a_.value_width, a_.value_width);
  }

  void multiply(const X* x, int64_t rows, const void* packed, int64_t head, int64_t outputs, T* out,
                int64_t stride) const {
    const int64_t panels = parts_of(outputs, kPanel);
    LinearArgs linear{};
    linear.packed = static_cast<const T*>(packed) + head * panels * kPanel * a_.latent;
    linear.out = out;
    linear.out_stride = stride;
    linear.in_features = a_.latent;
    linear.out_features = outputs;
#ifdef __AMX_BF16__
    if constexpr (is_same<T, bfloat16>) {
      linear.x = x;
      linear.x_stride = a_.latent;
      return TileTask(linear, 0, rows, 0, panels).run();
    }
#endif
    for (int64_t panel = 0; panel < panels; panel += kGroup) {
      run_task<T>(linear, x, a_.latent, 0, rows, panel, min_of(kGroup, panels - panel));
    }
  }

  // Query tokens begin … end-1.
  void attend(int64_t first, int64_t head, int64_t begin, int64_t end, float* scratch) const {
    const int64_t rows = expanded_rows(length_), position = length_ - tokens_;
    const QueryRows queries{begin, end, 1, position, 0, 0.0f, nullptr};
    const AttendedRows<T> attended{keys_ + head * rows * key_width_,
                                   values_ + head * rows * a_.value_width,
                                   key_width_,
                                   a_.value_width,
                                   a_.value_width,
                                   nullptr,
                                   0};
    const LanesPart total = LanesPart::at(scratch, end - begin, a_.value_width);
    // the softmax uses powers of two, so scores are scaled by log2 e
    Form form(attended, queries, a_.scale * kLog2E,
              scratch + LanesPart::floats(Form::kMostRows, a_.value_width));
    const T* query = static_cast<const T*>(a_.query) + first_token_ * a_.query_token_stride +
                     (first + head) * a_.query_head_stride;
    form.load_queries([&](int64_t token) { return query + token * a_.query_token_stride; });
    form.attend(0, position + end, total);
    T* out = static_cast<T*>(a_.out) + (first_token_ * a_.heads + first + head) * a_.value_width;
    form.write(total, [&](int64_t token) { return out + token * a_.heads * a_.value_width; });
  }

  const ExpandedAttentionArgs& a_;
  const int64_t first_token_, tokens_, length_, key_width_;
  const AttendedRows<T> cache_;
  T* const keys_;    // [heads_together, expanded_rows(length), nope + rotary]
  T* const values_;  // [heads_together, expanded_rows(length), value_width]
};

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(expanded_attention, ExpandedAttentionArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    for (int64_t s = 0; s < args.sequences; ++s) {
      const int64_t tokens = args.query_start[s + 1] - args.query_start[s];
      if (tokens > 0) ExpandedAttention<decltype(tag)>(args, s).run();
    }
  });
}

}  // namespace ascend_vllm

#endif

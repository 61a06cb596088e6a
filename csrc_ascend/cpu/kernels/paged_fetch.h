// Prefetching the next tile of keys and values while one is computed: a few lines at a time between other work,
// since a core has few requests for lines under way, and loads wait behind a burst of prefetches.
#pragma once

#include "cpu/kernels/paged_softmax.h"

namespace ascend_vllm {
namespace {

// Positions of one KV head.
template <class T>
struct KeyRange {
  const HeadBlocks<T>* blocks = nullptr;
  int64_t begin = 0, end = 0;  // equal if there are none
};

// kLocality: as that of __builtin_prefetch: 2 for the L2 cache, where L1 is full, 3 for L1.
template <class T, int kLocality = 2>
class TileFetch {
 public:
  // Fetches nothing.
  TileFetch() = default;
  // keys: what is read from now on; next: what follows then, of another head or sequence.
  TileFetch(const KeyRange<T>& keys, const KeyRange<T>& next) : keys_(keys), next_(next) {}

  // Turns to the tile that follows the one at `tile`.
  void start_after(int64_t tile) {
    const int64_t begin = tile + kTileKeys;
    begin < keys_.end ? start(keys_.blocks, begin, keys_.end) : start(next_.blocks, next_.begin, next_.end);
  }

  // Prefetches up to `lines` lines.
  [[gnu::always_inline]] void some(int64_t lines) {
    if (run_ == runs_) return;
    const char* from = at_[run_] + line_ * kLine;
    for (int64_t i = 0; i < min_of(lines, lines_ - line_); ++i)
      __builtin_prefetch(from + i * kLine, 0, kLocality);
    line_ += lines;
    if (line_ >= lines_) {
      line_ = 0;
      ++run_;
    }
  }

  // As `some`, of a number of lines that divides those of a run.
  template <int kLines>
  [[gnu::always_inline]] void part() {
    if (run_ == runs_) return;
    const char* from = at_[run_] + line_ * kLine;
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(from + i * kLine, 0, kLocality);
    line_ += kLines;
    if (line_ >= lines_) {
      line_ = 0;
      ++run_;
    }
  }

  void rest() {
    while (run_ < runs_) some(lines_);
  }

 private:
  static constexpr int64_t kLine = 64, kRunKeys = 16;  // blocks are multiples of a run

  void start(const HeadBlocks<T>* of, int64_t begin, int64_t end) {
    run_ = runs_ = line_ = 0;
    if (begin == end) return;
    const HeadBlocks<T>& blocks = *of;
    const int64_t tile_end = min_of(end, round_down(begin, kTileKeys) + kTileKeys);
    lines_ = kRunKeys * blocks.head_size * static_cast<int64_t>(sizeof(T)) / kLine;
    for (int64_t n = round_down(begin, kRunKeys); n < tile_end; n += kRunKeys) {
      at_[runs_++] = reinterpret_cast<const char*>(blocks.key(n));
      at_[runs_++] = reinterpret_cast<const char*>(blocks.value(n));
      if (blocks.key_scales == nullptr) continue;
      __builtin_prefetch(blocks.key_scales + blocks.scale_offset(n), 0, kLocality);
      __builtin_prefetch(blocks.value_scales + blocks.scale_offset(n), 0, kLocality);
    }
  }

  const KeyRange<T> keys_, next_;
  const char* at_[2 * kTileKeys / kRunKeys];
  int64_t lines_ = 0, run_ = 0, runs_ = 0, line_ = 0;
};

}  // namespace
}  // namespace ascend_vllm

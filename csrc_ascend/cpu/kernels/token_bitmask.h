// Sets logits whose bit is not set to -inf.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct TokenBitmaskArgs {
  DType dtype;
  void* logits;  // row s starts at s * stride elements
  int64_t vocab, stride;
  const int32_t* bitmask;  // [masks, words]
  int64_t masks, words;
  const int64_t* rows;  // [masks]: the row of each mask, none twice
};

ASCEND_VLLM_KERNEL(apply_token_bitmask, TokenBitmaskArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kTokensPerWord = 32;

template <class T>
inline void forbid_all(T* logits, int64_t n) {
  const VecF nothing = set1(-__builtin_inff());
  for_lanes(
      n, [&](int64_t i) { store(logits + i, nothing); },
      [&](int64_t i, int rest) { store_n(logits + i, nothing, rest); });
}

// The n <= 32 logits of one word. Most words are all ones (free text), which costs nothing, or all zeros (a
// keyword), which costs a few stores; otherwise only the less frequent kind of bits is visited.
template <class T>
inline void apply_word(T* logits, uint32_t word, int64_t n) {
  const uint32_t all = n == kTokensPerWord ? ~uint32_t{0} : (uint32_t{1} << n) - 1;
  const uint32_t allowed = word & all;
  if (allowed == all) return;
  if (2 * __builtin_popcount(allowed) < n) {
    T kept[kTokensPerWord];
    int count = 0;
    for (uint32_t bits = allowed; bits != 0; bits &= bits - 1) kept[count++] = logits[__builtin_ctz(bits)];
    forbid_all(logits, n);
    count = 0;
    for (uint32_t bits = allowed; bits != 0; bits &= bits - 1) logits[__builtin_ctz(bits)] = kept[count++];
    return;
  }
  const T nothing = from_float<T>(-__builtin_inff());
  for (uint32_t bits = ~word & all; bits != 0; bits &= bits - 1) logits[__builtin_ctz(bits)] = nothing;
}

template <class T>
void apply_bitmask(const TokenBitmaskArgs& a) {
  // in parts of a row, so that a single row uses several threads too
  parallel_for(a.masks * a.words, kTokensPerWord / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t mask = i / a.words, first = i % a.words * kTokensPerWord;
      const int64_t n = a.vocab - first < kTokensPerWord ? a.vocab - first : kTokensPerWord;
      T* logits = static_cast<T*>(a.logits) + a.rows[mask] * a.stride + first;
      apply_word(logits, static_cast<uint32_t>(a.bitmask[i]), n);
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(apply_token_bitmask, TokenBitmaskArgs) {
  with_dtype(args.dtype, [&](auto tag) { apply_bitmask<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif

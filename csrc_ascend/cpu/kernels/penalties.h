// Repetition, frequency and presence penalties on the logits of tokens that a sequence has.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct PenaltyArgs {
  float* logits;  // row s starts at s * stride
  int64_t rows, vocab, stride;
  const int32_t* token_ids;  // [slots, max_len]
  int64_t max_len;
  const int64_t* slots;
  const int32_t* prompt_lens;
  const int32_t* seq_lens;
  const float* repetition;
  const float* frequency;
  const float* presence;
};

ASCEND_VLLM_KERNEL(apply_penalties, PenaltyArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include <stdlib.h>

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// Counts of tokens, in a hash table whose size depends on the sequence's length, not the vocabulary's size.
struct TokenCount {
  int32_t token_plus_one;  // 0: free
  int32_t outputs;         // occurrences in the output
};

inline TokenCount& find(TokenCount* table, int shift, int32_t token) {
  const uint32_t mask = (uint32_t{1} << (32 - shift)) - 1;
  uint32_t place = (static_cast<uint32_t>(token) * 2654435769u) >> shift;  // Knuth's multiplicative hash
  while (table[place].token_plus_one != 0 && table[place].token_plus_one != token + 1)
    place = (place + 1) & mask;
  return table[place];
}

inline void penalise_row(const PenaltyArgs& a, int64_t s) {
  const float repetition = a.repetition[s], frequency = a.frequency[s], presence = a.presence[s];
  if (repetition == 1.0f && frequency == 0.0f && presence == 0.0f) return;
  const int64_t length = a.seq_lens[s] < a.max_len ? a.seq_lens[s] : a.max_len;
  if (length <= 0) return;
  int log_size = 1;
  while ((int64_t{1} << log_size) < 2 * length) ++log_size;
  TokenCount* table = static_cast<TokenCount*>(calloc(int64_t{1} << log_size, sizeof(TokenCount)));
  if (table == nullptr) abort();
  const int32_t* tokens = a.token_ids + a.slots[s] * a.max_len;
  for (int64_t i = 0; i < length; ++i) {
    if (tokens[i] < 0 || tokens[i] >= a.vocab) continue;
    TokenCount& entry = find(table, 32 - log_size, tokens[i]);
    entry.token_plus_one = tokens[i] + 1;
    entry.outputs += i >= a.prompt_lens[s];
  }
  float* logits = a.logits + s * a.stride;
  for (int64_t place = 0; place < int64_t{1} << log_size; ++place) {
    const TokenCount entry = table[place];
    if (entry.token_plus_one == 0) continue;
    float& logit = logits[entry.token_plus_one - 1];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(entry.outputs);
    if (entry.outputs > 0) logit -= presence;
  }
  free(table);
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(apply_penalties, PenaltyArgs) {
  const PenaltyArgs& a = args;
  int64_t longest = 0;
  for (int64_t s = 0; s < a.rows; ++s) longest = a.seq_lens[s] > longest ? a.seq_lens[s] : longest;
  parallel_for(a.rows, 8 * longest, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) penalise_row(a, s);
  });
}

}  // namespace ascend_vllm

#endif

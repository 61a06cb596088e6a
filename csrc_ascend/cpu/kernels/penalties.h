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

// counts: [vocab] zeros, and zeros again on return; 1 + twice the occurrences in the output for a token in
// play.
inline void penalise_row(const PenaltyArgs& a, int64_t s, int32_t* counts) {
  const float repetition = a.repetition[s], frequency = a.frequency[s], presence = a.presence[s];
  if (repetition == 1.0f && frequency == 0.0f && presence == 0.0f) return;
  float* logits = a.logits + s * a.stride;
  const int32_t* tokens = a.token_ids + a.slots[s] * a.max_len;
  const int64_t length = a.seq_lens[s] < a.max_len ? a.seq_lens[s] : a.max_len;
  const auto known = [&](int32_t token) { return token >= 0 && token < a.vocab; };
  for (int64_t i = 0; i < length; ++i) {
    if (known(tokens[i])) counts[tokens[i]] = (counts[tokens[i]] | 1) + (i >= a.prompt_lens[s] ? 2 : 0);
  }
  for (int64_t i = 0; i < length; ++i) {
    if (!known(tokens[i]) || counts[tokens[i]] == 0) continue;  // zero: done at its first occurrence
    const int32_t occurrences = counts[tokens[i]] >> 1;
    counts[tokens[i]] = 0;
    float logit = logits[tokens[i]];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(occurrences);
    logits[tokens[i]] = occurrences > 0 ? logit - presence : logit;
  }
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(apply_penalties, PenaltyArgs) {
  const PenaltyArgs& a = args;
  parallel_for(a.rows, 8 * a.max_len, [&](int64_t begin, int64_t end) {
    // Zero pages of the system: only those that tokens touch are ever materialised.
    int32_t* counts = static_cast<int32_t*>(calloc(a.vocab, sizeof(int32_t)));
    if (counts == nullptr) abort();
    for (int64_t s = begin; s < end; ++s) penalise_row(a, s, counts);
    free(counts);
  });
}

}  // namespace ascend_vllm

#endif

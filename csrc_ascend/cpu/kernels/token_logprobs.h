// Log-probabilities of one token and of the most likely ones of each row, without a temporary array of the
// vocabulary's size.
//
// One pass over the row computes the maximum of every block, the sum of exponentials and the number of logits
// above the token's own. The block maxima give a lower bound of the k-th largest logit, so only the few blocks
// that reach it are read again for the most likely tokens.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct TokenLogprobsArgs {
  DType dtype;
  const void* logits;  // row a starts at a * stride elements
  int64_t rows, vocab, stride;
  const int64_t* token_ids;
  int64_t top;             // at most vocab
  int64_t* out_token_ids;  // [rows, 1 + top]
  float* out_logprobs;     // [rows, 1 + top]
  int64_t* out_ranks;
};

ASCEND_VLLM_KERNEL(token_logprobs, TokenLogprobsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include <stdlib.h>

#include "cpu/kernels/row_blocks.h"
#include "cpu/kernels/select.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

struct Candidate {
  float logit;
  int64_t id;
};

// Whether `a` is ordered behind `b`: it is smaller, or equal with a higher id.
inline bool is_behind(const Candidate& a, const Candidate& b) {
  return a.logit < b.logit || (a.logit == b.logit && a.id > b.id);
}

// Replaces the root of heap[0, n), which is ordered behind all others.
inline void replace_root(Candidate* heap, int64_t n, Candidate value) {
  int64_t place = 0;
  for (int64_t child; (child = 2 * place + 1) < n; place = child) {
    if (child + 1 < n && is_behind(heap[child + 1], heap[child])) ++child;
    if (!is_behind(heap[child], value)) break;
    heap[place] = heap[child];
  }
  heap[place] = value;
}

// Appends `value` to heap[0, n).
inline void push(Candidate* heap, int64_t n, Candidate value) {
  int64_t place = n;
  for (; place > 0 && is_behind(value, heap[(place - 1) / 2]); place = (place - 1) / 2) {
    heap[place] = heap[(place - 1) / 2];
  }
  heap[place] = value;
}

// The sum of e^(x - shift).
template <class T>
inline double sum_exp(const T* x, int64_t n, float shift) {
  VecF sum = set1(0.0f);
  float tail = 0.0f;
  for_lanes(
      n, [&](int64_t i) { sum = sum + exp(load(x + i) - set1(shift)); },
      [&](int64_t i, int rest) {
        alignas(64) float buffer[kLanes];
        store(buffer, exp(load_n(x + i, rest) - set1(shift)));
        for (int j = 0; j < rest; ++j) tail += buffer[j];
      });
  return static_cast<double>(reduce_add(sum)) + tail;
}

// How many of n logits are greater than `own`.
template <class T>
inline int64_t count_above(const T* x, int64_t n, float own) {
  int64_t above = 0;
  for_lanes(
      n, [&](int64_t i) { above += count(gt(load(x + i), set1(own))); },
      [&](int64_t i, int rest) {
        for (int j = 0; j < rest; ++j) above += to_float(x[i + j]) > own;
      });
  return above;
}

// The `top` largest logits of a row, the largest first and the lower id first among equal ones, into `heap`.
template <class T>
inline void find_top(const T* x, int64_t vocab, const float* block_max, int64_t top, Candidate* heap,
                     float* scratch) {
  if (top == 0) return;
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  // At least `top` logits are >= the top-th largest block maximum.
  float low = -kInfinity;
  if (top <= blocks) {
    for (int64_t b = 0; b < blocks; ++b) scratch[b] = block_max[b];
    low = select_largest(scratch, blocks, top);
  }
  int64_t size = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (size == top ? !(block_max[b] > heap[0].logit) : !(block_max[b] >= low)) continue;
    const int64_t end = b + 1 == blocks ? vocab : (b + 1) * kBlock;
    for (int64_t i = b * kBlock; i < end; i += kLanes) {
      const int n = static_cast<int>(end - i < kLanes ? end - i : kLanes);
      const VecF v = n == kLanes ? load(x + i) : load_n(x + i, n);
      const Mask wanted = size == top ? gt(v, set1(heap[0].logit)) : ge(v, set1(low));
      for (unsigned found = bits(wanted) & ((1u << n) - 1); found != 0; found &= found - 1) {
        const int64_t id = i + __builtin_ctz(found);
        const Candidate candidate{to_float(x[id]), id};
        // ids ascend, so of equal logits the earlier one is kept
        if (size < top) {
          push(heap, size++, candidate);
        } else if (candidate.logit > heap[0].logit) {
          replace_root(heap, top, candidate);
        }
      }
    }
  }
  for (int64_t n = top - 1; n > 0; --n) {
    const Candidate last = heap[0];
    replace_root(heap, n, heap[n]);
    heap[n] = last;
  }
}

template <class T>
void report_row(const TokenLogprobsArgs& a, int64_t row, float* block_max, float* scratch, Candidate* heap) {
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  const float own = to_float(x[a.token_ids[row]]);
  float largest = -kInfinity;
  double sum = 0.0;  // of e^(logit - largest)
  int64_t above = 0;
  for (int64_t begin = 0; begin < a.vocab; begin += kBlock) {
    const int64_t n = a.vocab - begin < kBlock ? a.vocab - begin : kBlock;
    const float here = max_of(x + begin, n);
    block_max[begin / kBlock] = here;
    if (here > largest) {
      sum *= __builtin_exp(static_cast<double>(largest) - static_cast<double>(here));
      largest = here;
    }
    // the sum stays 0 while all logits are -inf, and becomes NaN with a NaN
    sum += sum_exp(x + begin, n, largest == -kInfinity ? 0.0f : largest);
    if (here > own) above += count_above(x + begin, n, own);
  }
  int64_t* ids = a.out_token_ids + row * (1 + a.top);
  float* logprobs = a.out_logprobs + row * (1 + a.top);
  ids[0] = a.token_ids[row];
  if (!(sum > 0.0)) {  // not a distribution: all log-probabilities are NaN, and all tokens equal
    for (int64_t k = 0; k <= a.top; ++k) logprobs[k] = __builtin_nanf("");
    for (int64_t k = 0; k < a.top; ++k) ids[1 + k] = k;
    a.out_ranks[row] = 1;
    return;
  }
  const double log_sum = __builtin_log(sum);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(largest) - log_sum);
  };
  logprobs[0] = logprob(own);
  a.out_ranks[row] = 1 + above;
  find_top(x, a.vocab, block_max, a.top, heap, scratch);
  for (int64_t k = 0; k < a.top; ++k) {
    ids[1 + k] = heap[k].id;
    logprobs[1 + k] = logprob(heap[k].logit);
  }
}

template <class T>
void token_logprobs(const TokenLogprobsArgs& a) {
  const int64_t blocks = (a.vocab + kBlock - 1) / kBlock;
  // at most one thread per row, so that results do not depend on the number of threads
  parallel_for(a.rows, a.vocab, [&](int64_t begin, int64_t end) {
    void* memory = malloc(a.top * sizeof(Candidate) + 2 * blocks * sizeof(float));
    if (memory == nullptr) abort();
    Candidate* heap = static_cast<Candidate*>(memory);
    float* block_max = reinterpret_cast<float*>(heap + a.top);
    for (int64_t row = begin; row < end; ++row) {
      report_row<T>(a, row, block_max, block_max + blocks, heap);
    }
    free(memory);
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(token_logprobs, TokenLogprobsArgs) {
  with_dtype(args.dtype, [&](auto tag) { token_logprobs<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif

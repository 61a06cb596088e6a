// The experts that each token uses, and their weights.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

// An expert's score is its softmax or sigmoid. Experts are chosen by the score plus the bias, among those of
// the best groups; a group is as good as its best expert, or, with a bias, as the sum of its two best.
struct RouteArgs {
  DType dtype;
  const void* logits;  // [tokens, experts]; row t starts at t * stride elements
  const float* bias;   // [experts] or null
  int32_t* ids;        // [tokens, choices], best first; of equal ones that with the smaller number
  float* weights;      // [tokens, choices], the scores, times `scale`
  float* workspace;    // [tokens, 2 * experts + groups]
  int64_t tokens, stride, experts, choices, groups, chosen_groups;
  bool is_sigmoid, renormalize;
  float scale;
};

ASCEND_VLLM_KERNEL(route_tokens, RouteArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

const float kNever = -__builtin_inff();

// scores[experts] of one token. One that is not a number counts as the worst.
template <class T>
inline void score(const RouteArgs& a, const T* logits, float* scores) {
  float most = kNever, sum = 0.0f;
  for (int64_t e = 0; e < a.experts; ++e) {
    scores[e] = to_float(logits[e]);
    most = scores[e] > most ? scores[e] : most;
  }
  // sigmoid(x) = 1 / (1 + exp(-x)); softmax(x) = exp(x - most) / sum
  const VecF shift = set1(a.is_sigmoid ? 0.0f : most), one = set1(1.0f), zero = set1(0.0f);
  const auto compute = [&](VecF x) { return a.is_sigmoid ? one / (one + exp(zero - x)) : exp(x - shift); };
  for_lanes(
      a.experts, [&](int64_t i) { store(scores + i, compute(load(scores + i))); },
      [&](int64_t i, int rest) { store_n(scores + i, compute(load_n(scores + i, rest)), rest); });
  if (a.is_sigmoid) return;
  for (int64_t e = 0; e < a.experts; ++e) sum += scores[e];
  for (int64_t e = 0; e < a.experts; ++e) scores[e] /= sum;
}

// Index of the largest of n values, the first of equal ones.
inline int64_t best_of(const float* values, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) best = values[i] > values[best] ? i : best;
  return best;
}

// Removes the experts of all but the best groups.
inline void keep_groups(const RouteArgs& a, float* ranks, float* groups) {
  const int64_t size = a.experts / a.groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    float first = kNever, second = kNever;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (ranks[e] > first) {
        second = first;
        first = ranks[e];
      } else if (ranks[e] > second) {
        second = ranks[e];
      }
    }
    groups[g] = a.bias == nullptr || size == 1 ? first : first + second;
  }
  for (int64_t kept = 0; kept < a.chosen_groups; ++kept) groups[best_of(groups, a.groups)] = kNever;
  for (int64_t g = 0; g < a.groups; ++g) {
    if (groups[g] != kNever) std::fill_n(ranks + g * size, size, kNever);
  }
}

template <class T>
void route_token(const RouteArgs& a, int64_t token) {
  float* scores = a.workspace + token * (2 * a.experts + a.groups);
  float *ranks = scores + a.experts, *groups = ranks + a.experts;
  score(a, static_cast<const T*>(a.logits) + token * a.stride, scores);
  for (int64_t e = 0; e < a.experts; ++e) {
    const float rank = a.bias == nullptr ? scores[e] : scores[e] + a.bias[e];
    ranks[e] = rank == rank ? rank : kNever;
  }
  if (a.groups > 1) keep_groups(a, ranks, groups);
  int32_t* ids = a.ids + token * a.choices;
  float *weights = a.weights + token * a.choices, sum = 0.0f;
  for (int64_t c = 0; c < a.choices; ++c) {
    const int64_t best = best_of(ranks, a.experts);
    ranks[best] = kNever;
    ids[c] = static_cast<int32_t>(best);
    weights[c] = scores[best];
    sum += weights[c];
  }
  const float factor = a.renormalize ? a.scale / (sum + 1e-20f) : a.scale;
  for (int64_t c = 0; c < a.choices; ++c) weights[c] *= factor;
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(route_tokens, RouteArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    parallel_for(args.tokens, args.experts * (8 + args.choices), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) route_token<decltype(tag)>(args, t);
    });
  });
}

}  // namespace ascend_vllm

#endif

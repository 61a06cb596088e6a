// Kernels of logits: routing, penalties, masks, log-probabilities, sampling.
#include "cpu/kernels/sampling.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "cpu/check/check.h"
#include "cpu/kernels/penalties.h"
#include "cpu/kernels/route.h"
#include "cpu/kernels/token_bitmask.h"
#include "cpu/kernels/token_logprobs.h"

namespace ascend_vllm::check {
namespace {

constexpr int64_t kVocabularies[] = {1, 37, 1000, 4099};

// Indices, the largest number first, of equal ones the first.
template <class Number>
std::vector<int64_t> ranked(const std::vector<Number>& numbers) {
  std::vector<int64_t> order(numbers.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return numbers[a] > numbers[b]; });
  return order;
}

template <class T>
std::vector<double> wide(const T* x, int64_t n) {
  std::vector<double> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(to_float(x[i]));
  return numbers;
}

ASCEND_VLLM_CHECK(route_tokens) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const bool is_sigmoid : {false, true}) {
      const int64_t tokens = 7, experts = 24, choices = 3, groups = is_sigmoid ? 4 : 1,
                    kept = is_sigmoid ? 2 : 1;
      Random random(is_sigmoid);
      const auto logits = numbers<T>(random, tokens * experts, 4.0);
      const auto bias = numbers<float>(random, experts, 0.2);
      std::vector<int32_t> ids(tokens * choices);
      std::vector<float> weights(tokens * choices), workspace(tokens * (2 * experts + groups));
      route_tokens_kernel({kDType<T>, logits.data(), is_sigmoid ? bias.data() : nullptr, ids.data(),
                           weights.data(), workspace.data(), tokens, experts, experts, choices, groups, kept,
                           is_sigmoid, true, 2.5f});
      Case own("route_tokens", shape_of<T>({is_sigmoid}));
      for (int64_t t = 0; t < tokens; ++t) {
        auto scores = wide(logits.data() + t * experts, experts);
        double sum = 0.0;
        for (double& score : scores)
          sum += score = is_sigmoid ? 1.0 / (1.0 + std::exp(-score)) : std::exp(score);
        if (!is_sigmoid) {
          for (double& score : scores) score /= sum;
        }
        auto ranks = scores;
        if (is_sigmoid) {
          const int64_t size = experts / groups;
          std::vector<double> best(groups);
          for (int64_t e = 0; e < experts; ++e) ranks[e] += bias[e];
          for (int64_t g = 0; g < groups; ++g) {
            std::vector<double> group(ranks.begin() + g * size, ranks.begin() + (g + 1) * size);
            std::sort(group.begin(), group.end());
            best[g] = group[size - 1] + group[size - 2];
          }
          const auto order = ranked(best);
          for (int64_t g = kept; g < groups; ++g) {
            std::fill_n(ranks.begin() + order[g] * size, size, -1e300);
          }
        }
        // results may differ only between experts of almost the same rank
        double chosen_sum = 0.0;
        const auto order = ranked(ranks);
        for (int64_t c = 0; c < choices; ++c) chosen_sum += scores[ids[t * choices + c]];
        for (int64_t c = 0; c < choices; ++c) {
          const int64_t at = t * choices + c;
          own.near(static_cast<float>(ranks[ids[at]]), ranks[order[c]], 1e-6, at);
          own.near(weights[at], 2.5 * scores[ids[at]] / chosen_sum, 1e-6 * 2.5, at);
        }
      }
    }
  });
}

ASCEND_VLLM_CHECK(apply_penalties) {
  const int64_t rows = 3, vocab = 101, stride = 110, max_len = 60;
  Random random(2);
  auto logits = numbers<float>(random, rows * stride, 5.0);
  const auto before = logits;
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < 5 * max_len; ++i) tokens.push_back(static_cast<int32_t>(random.below(vocab)));
  const int64_t slots[] = {4, 0, 2};
  const int32_t prompts[] = {10, 0, 59}, lengths[] = {50, 33, 60};
  const float repetition[] = {1.3f, 1.0f, 0.8f}, frequency[] = {0.25f, 0.0f, -0.5f},
              presence[] = {0.5f, 0.0f, 0.1f};
  apply_penalties_kernel({logits.data(), rows, vocab, stride, tokens.data(), max_len, slots, prompts, lengths,
                          repetition, frequency, presence});
  Case own("apply_penalties", "float32");
  for (int64_t i = 0; i < rows * stride; ++i) {
    const int64_t s = i / stride;
    int occurrences = 0, outputs = 0;
    for (int64_t n = 0; n < lengths[s]; ++n) {
      if (tokens[slots[s] * max_len + n] != i % stride) continue;
      ++occurrences;
      outputs += n >= prompts[s];
    }
    double want = before[i];
    if (occurrences > 0) want = want > 0 ? want / repetition[s] : want * repetition[s];
    want -= outputs * static_cast<double>(frequency[s]) + (outputs > 0 ? presence[s] : 0.0f);
    own.near(logits[i], want, 1e-5, i);
  }
}

ASCEND_VLLM_CHECK(apply_token_bitmask) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t vocab : kVocabularies) {
      const int64_t words = (vocab + 31) / 32, rows[] = {2, 0};
      Random random(vocab);
      auto logits = numbers<T>(random, 3 * vocab);
      const auto before = logits;
      std::vector<int32_t> mask;
      // words of all ones, of all zeros, of few and of many ones
      for (int64_t i = 0; i < 2 * words; ++i) {
        const uint64_t kinds[] = {~0ull, 0, random.bits() & random.bits() & random.bits(),
                                  random.bits() | random.bits()};
        mask.push_back(static_cast<int32_t>(kinds[random.below(4)]));
      }
      apply_token_bitmask_kernel({kDType<T>, logits.data(), vocab, vocab, mask.data(), 2, words, rows});
      Case own("apply_token_bitmask", shape_of<T>({vocab}));
      for (int64_t i = 0; i < 3 * vocab; ++i) {
        const int64_t row = i / vocab, n = i % vocab, m = row == 2 ? 0 : 1;
        const bool is_allowed =
            row == 1 || (static_cast<uint32_t>(mask[m * words + n / 32]) >> (n % 32) & 1) != 0;
        own.equal(to_float(logits[i]), is_allowed ? to_float(before[i]) : -__builtin_inff(), i);
      }
    }
  });
}

ASCEND_VLLM_CHECK(token_logprobs) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t vocab : kVocabularies) {
      const int64_t rows = 3, top = std::min<int64_t>(vocab, 6), each = 1 + top;
      Random random(vocab);
      const auto logits = numbers<T>(random, rows * vocab, 8.0);
      const int64_t tokens[] = {0, vocab - 1, vocab / 2};
      std::vector<int64_t> ids(rows * each), ranks(rows);
      std::vector<float> logprobs(rows * each);
      token_logprobs_kernel({kDType<T>, logits.data(), rows, vocab, vocab, tokens, top, ids.data(),
                             logprobs.data(), ranks.data()});
      Case own("token_logprobs", shape_of<T>({vocab}));
      for (int64_t r = 0; r < rows; ++r) {
        const auto x = wide(logits.data() + r * vocab, vocab);
        const auto order = ranked(x);
        double sum = 0.0, above = 0.0;
        for (const double logit : x) {
          sum += std::exp(logit);
          above += logit > x[tokens[r]];
        }
        own.equal(static_cast<double>(ranks[r]), 1 + above, r);
        for (int64_t k = 0; k < each; ++k) {
          const int64_t want = k == 0 ? tokens[r] : order[k - 1];
          own.equal(static_cast<double>(ids[r * each + k]), static_cast<double>(want), r * each + k);
          own.near(logprobs[r * each + k], x[want] - std::log(sum), 1e-5, r * each + k);
        }
      }
    }
  });
}

ASCEND_VLLM_CHECK(philox_uniform) {
  // Philox4x32-10 at a counter and a key of zeros, and of ones, as Random123 prints them in its kat_vectors:
  // the first two words are these
  const uint32_t words[][2] = {{0x6627e8d5, 0xe169c58d}};
  const int64_t seeds[] = {0}, positions[] = {0};
  double out[1];
  philox_uniform_kernel({seeds, positions, out, 1});
  Case own("philox_uniform", "");
  own.equal(out[0], static_cast<double>((uint64_t{words[0][0]} >> 5) << 26 | words[0][1] >> 6) * 0x1p-53, 0);
}

ASCEND_VLLM_CHECK(sample_tokens) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t vocab : kVocabularies) {
      constexpr int64_t kRows = 6;
      Random random(vocab);
      const auto logits = numbers<T>(random, kRows * vocab, 6.0);
      const float temperature[] = {0.0f, 1.0f, 0.7f, 1.3f, 1.0f, 0.5f},
                  top_p[] = {1.0f, 1.0f, 0.9f, 0.5f, 1.0f, 0.95f};
      const float min_p[] = {0.0f, 0.0f, 0.0f, 0.0f, 0.05f, 0.01f};
      const int32_t top_k[] = {0, 0, 20, 0, 0, 50};
      const int64_t seeds[] = {1, 2, 3, 4, 5, 6}, positions[] = {0, 7, 1, 9, 2, 30};
      std::vector<int64_t> out(kRows);
      std::vector<double> draws(kRows);
      sample_tokens_kernel({kDType<T>, logits.data(), kRows, vocab, vocab, temperature, top_k, top_p, min_p,
                            seeds, positions, out.data()});
      philox_uniform_kernel({seeds, positions, draws.data(), kRows});
      Case own("sample_tokens", shape_of<T>({vocab}));
      for (int64_t s = 0; s < kRows; ++s) {
        const auto x = wide(logits.data() + s * vocab, vocab);
        const auto order = ranked(x);
        if (temperature[s] == 0.0f) {
          own.equal(static_cast<double>(out[s]), static_cast<double>(order[0]), s);
          continue;
        }
        // kept tokens: of the most likely ones at most top_k, at least min_p as likely as the first, those
        // before which less than top_p of what is kept so far was
        std::vector<double> weights(vocab);
        const double largest = x[order[0]];
        for (int64_t i = 0; i < vocab; ++i) weights[i] = std::exp((x[i] - largest) / temperature[s]);
        double least = min_p[s];
        if (top_k[s] > 0 && top_k[s] < vocab) least = std::max(least, weights[order[top_k[s] - 1]]);
        double mass = 0.0, above = 0.0;
        for (const double weight : weights) mass += weight >= least * (1 - 1e-9) ? weight : 0.0;
        double limit = least;
        for (const int64_t id : order) {
          if (weights[id] < least * (1 - 1e-9) || (above >= top_p[s] * mass && weights[id] < limit)) break;
          limit = weights[id];
          above += weights[id];
        }
        double total = 0.0, before = 0.0;
        for (const double weight : weights) total += weight >= limit * (1 - 1e-9) ? weight : 0.0;
        for (int64_t i = 0; i < out[s]; ++i) before += weights[i] >= limit * (1 - 1e-9) ? weights[i] : 0.0;
        const double draw = draws[s] * total;
        const bool is_kept = weights[out[s]] >= limit * (1 - 1e-6);
        const bool is_drawn = before <= draw + 1e-5 * total && draw <= before + weights[out[s]] + 1e-5 * total;
        own.equal(is_kept && is_drawn, true, s);
      }
    }
  });
}

}  // namespace
}  // namespace ascend_vllm::check

// Samples tokens from logits without sorting the vocabulary.
//
// One pass computes the maximum of every block of the row. The block maxima give a lower bound of the k-th
// largest logit, so top-k searches only a few blocks. Top-p builds a histogram of probability by distance from
// the maximum and searches only the bin with its limit. Sums per block are kept in double, so drawing reads one
// block instead of the row.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct SampleArgs {
  DType dtype;
  const void* logits;  // row s starts at s * stride elements
  int64_t rows, vocab, stride;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* out;
};

struct UniformArgs {
  const int64_t* seeds;
  const int64_t* positions;
  double* out;
  int64_t size;
};

ASCEND_VLLM_KERNEL(sample_tokens, SampleArgs)
ASCEND_VLLM_KERNEL(philox_uniform, UniformArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include <stdlib.h>

#include "cpu/kernels/row_blocks.h"
#include "cpu/kernels/select.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// 53 random bits as a double in [0, 1): Philox4x32-10 (Salmon et al., 2011) keyed by the seed, at counter
// `position`.
inline double uniform(int64_t seed, int64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position),
           c1 = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return static_cast<double>((uint64_t{c0} >> 5) << 26 | c1 >> 6) * 0x1p-53;
}

// One row and its kept logits: those >= threshold.
template <class T>
struct Row {
  const T* logits;
  int64_t vocab, blocks;
  float* block_max;   // [blocks]
  double* block_sum;  // [blocks]
  float largest;      // of all logits
  float scale;        // 1 / temperature
  float threshold;

  int64_t begin(int64_t block) const { return block * kBlock; }
  int64_t end(int64_t block) const { return block + 1 == blocks ? vocab : (block + 1) * kBlock; }
};

template <class T>
inline void find_block_maxima(Row<T>& row) {
  parallel_for(row.blocks, kBlock / 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      row.block_max[b] = max_of(row.logits + row.begin(b), row.end(b) - row.begin(b));
    }
  });
  row.largest = max_of(row.block_max, row.blocks);
}

template <class T>
inline int64_t first_largest(const Row<T>& row) {
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.block_max[b] != row.largest) continue;
    for (int64_t i = row.begin(b); i < row.end(b); ++i) {
      if (to_float(row.logits[i]) == row.largest) return i;
    }
  }
  return 0;  // only if every logit is NaN
}

// Appends the logits in [low, high) to `values`.
template <class T>
inline void gather(const Row<T>& row, float low, float high, Floats& values) {
  const VecF lowest = set1(low), limit = set1(high);
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(row.block_max[b] >= low)) continue;
    values.reserve(values.size + kBlock);
    for (int64_t i = row.begin(b); i < row.end(b); i += kLanes) {
      const int n = static_cast<int>(row.end(b) - i < kLanes ? row.end(b) - i : kLanes);
      const VecF v = n == kLanes ? load(row.logits + i) : load_n(row.logits + i, n);
      unsigned found = bits(ge(v, lowest)) & bits(gt(limit, v)) & ((1u << n) - 1);
      for (; found != 0; found &= found - 1)
        values.data[values.size++] = to_float(row.logits[i + __builtin_ctz(found)]);
    }
  }
}

// e^((x - largest) / temperature), defined once so that every pass computes the same number.
template <class T>
inline VecF weight(const Row<T>& row, VecF x) {
  return exp((x - set1(row.largest)) * set1(row.scale));
}

// The sum of the weights of n kept values.
template <class T>
inline double weigh(const Row<T>& row, const float* values, int64_t n) {
  double sum = 0.0;
  for_lanes(
      n, [&](int64_t i) { sum += reduce_add(weight(row, load(values + i))); },
      [&](int64_t i, int rest) {
        alignas(64) float buffer[kLanes];
        store(buffer, weight(row, load_n(values + i, rest)));
        for (int j = 0; j < rest; ++j) sum += buffer[j];
      });
  return sum;
}

// Sums the kept weights per block; returns the total.
template <class T>
inline double find_block_sums(Row<T>& row) {
  const VecF threshold = set1(row.threshold), zero = set1(0.0f);
  parallel_for(row.blocks, 4 * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (!(row.block_max[b] >= row.threshold)) {
        row.block_sum[b] = 0.0;
        continue;
      }
      const T* x = row.logits + row.begin(b);
      VecF sum = zero;
      float tail = 0.0f;
      for_lanes(
          row.end(b) - row.begin(b),
          [&](int64_t i) {
            const VecF v = load(x + i);
            sum = sum + select(ge(v, threshold), weight(row, v), zero);
          },
          [&](int64_t i, int rest) {
            const VecF v = load_n(x + i, rest);
            alignas(64) float buffer[kLanes];
            store(buffer, select(ge(v, threshold), weight(row, v), zero));
            for (int j = 0; j < rest; ++j) tail += buffer[j];
          });
      row.block_sum[b] = static_cast<double>(reduce_add(sum)) + tail;
    }
  });
  double total = 0.0;
  for (int64_t b = 0; b < row.blocks; ++b) total += row.block_sum[b];
  return total;
}

// Raises the threshold to the k-th largest kept logit, if there are that many.
template <class T>
inline void apply_top_k(Row<T>& row, int64_t k, Floats& values) {
  float low = row.threshold;
  if (k <= row.blocks) {
    // At least k logits are >= the k-th largest block maximum.
    values.size = 0;
    values.reserve(row.blocks);
    for (int64_t b = 0; b < row.blocks; ++b) values.data[values.size++] = row.block_max[b];
    const float bound = select_largest(values.data, values.size, k);
    low = bound > low ? bound : low;
  }
  values.size = 0;
  gather(row, low, kInfinity, values);
  if (values.size >= k) {
    const float kth = select_largest(values.data, values.size, k);
    row.threshold = kth > row.threshold ? kth : row.threshold;
  }
}

// Histogram of probability by distance from the largest logit: bin i has the weights of the kept logits with
// i <= (largest - logit) / width < i + 1; the last bin also has those further away.
constexpr int kBins = 256;
struct Histogram {
  double sums[kBins];
};

template <class T>
inline void add_block(const Row<T>& row, int64_t block, float inverse_width, Histogram& histogram) {
  for (int64_t i = row.begin(block); i < row.end(block); i += kLanes) {
    const int n = static_cast<int>(row.end(block) - i < kLanes ? row.end(block) - i : kLanes);
    const VecF v = n == kLanes ? load(row.logits + i) : load_n(row.logits + i, n);
    unsigned found = bits(ge(v, set1(row.threshold))) & ((1u << n) - 1);
    if (found == 0) continue;
    alignas(64) float weights[kLanes], bins[kLanes];
    store(weights, weight(row, v));
    store(bins, min((set1(row.largest) - v) * set1(inverse_width), set1(kBins - 1.0f)));
    for (; found != 0; found &= found - 1) {
      const int lane = __builtin_ctz(found);
      histogram.sums[static_cast<int>(bins[lane])] += weights[lane];
    }
  }
}

// Raises the threshold to the lowest logit for which the logits above it have less than top_p of the kept
// weight.
template <class T>
inline void apply_top_p(Row<T>& row, float top_p, Floats& values) {
  // Bins of an eighth of a nat reach e^-32 of the largest weight.
  const float width = 0.125f / row.scale;
  // Chunks of the row have histograms of their own. Their number must not depend on the threads, or else the
  // rounding of sums would.
  constexpr int64_t kChunks = 8;
  Histogram chunks[kChunks] = {};
  parallel_for(kChunks, row.vocab / kChunks * 8, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t b = row.blocks * c / kChunks; b < row.blocks * (c + 1) / kChunks; ++b) {
        if (row.block_max[b] >= row.threshold) add_block(row, b, 1.0f / width, chunks[c]);
      }
    }
  });
  double total = 0.0;
  for (int bin = 0; bin < kBins; ++bin) {
    for (int64_t c = 1; c < kChunks; ++c) chunks[0].sums[bin] += chunks[c].sums[bin];
    total += chunks[0].sums[bin];
  }
  const double mass = static_cast<double>(top_p) * total;
  double above = 0.0;
  int bin = 0;
  while (bin < kBins - 1 && above + chunks[0].sums[bin] < mass) above += chunks[0].sums[bin++];
  // The limit is in this bin. Logits are gathered with some slack at its edges, which are rounded differently
  // from a logit's bin, and then filtered by their bin.
  const float slack = width;
  const float high = bin == 0 ? kInfinity : row.largest - static_cast<float>(bin) * width + slack;
  float low = bin == kBins - 1 ? row.threshold : row.largest - static_cast<float>(bin + 1) * width - slack;
  if (!(low > row.threshold)) low = row.threshold;
  values.size = 0;
  gather(row, low, high, values);
  if (values.size == 0) return;
  const auto member = [&](float x) {
    const float place = (row.largest - x) * (1.0f / width);
    return static_cast<int>(place < kBins - 1.0f ? place : kBins - 1.0f);
  };
  int64_t members = 0;
  for (int64_t i = 0; i < values.size; ++i) {
    if (member(values.data[i]) == bin) values.data[members++] = values.data[i];
  }
  if (members == 0) return;
  const auto weigh_part = [&](const float* part, int64_t n) { return weigh(row, part, n); };
  const float found = select_by_mass(values.data, members, mass - above, weigh_part);
  if (found > row.threshold) row.threshold = found;
}

// The token whose interval of [0, total) contains the target.
template <class T>
inline int64_t pick(const Row<T>& row, double target) {
  double sum = 0.0;
  int64_t last = -1;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.block_sum[b] == 0.0) continue;
    const bool inside = sum + row.block_sum[b] > target;
    const int64_t begin = row.begin(b), end = row.end(b);
    if (inside) {
      for (int64_t i = begin; i < end; i += kLanes) {
        const int n = static_cast<int>(end - i < kLanes ? end - i : kLanes);
        alignas(64) float x[kLanes], w[kLanes];
        const VecF v = n == kLanes ? load(row.logits + i) : load_n(row.logits + i, n);
        store(x, v);
        store(w, weight(row, v));
        for (int j = 0; j < n; ++j) {
          if (!(x[j] >= row.threshold) || w[j] == 0.0f) continue;
          sum += w[j];
          last = i + j;
          if (sum > target) return last;
        }
      }
      return last;  // the block's own sum was rounded up past the target
    }
    sum += row.block_sum[b];
    last = b;
  }
  // the target was rounded up to the total: the last kept token
  for (int64_t i = row.end(last) - 1; i > row.begin(last); --i) {
    if (to_float(row.logits[i]) >= row.threshold) return i;
  }
  return row.begin(last);
}

template <class T>
int64_t sample_row(const SampleArgs& a, int64_t s, float* block_max, double* block_sum) {
  Row<T> row{};
  row.logits = static_cast<const T*>(a.logits) + s * a.stride;
  row.vocab = a.vocab;
  row.blocks = (a.vocab + kBlock - 1) / kBlock;
  row.block_max = block_max;
  row.block_sum = block_sum;
  find_block_maxima(row);
  const bool finite = row.largest - row.largest == 0.0f;
  if (!(a.temperature[s] > 0.0f) || !finite) return first_largest(row);

  row.scale = 1.0f / a.temperature[s];
  row.threshold = -kInfinity;
  if (a.min_p[s] > 0.0f) {
    row.threshold = row.largest + a.temperature[s] * static_cast<float>(__builtin_log(a.min_p[s]));
  }
  Floats values{};
  if (a.top_k[s] > 0 && a.top_k[s] < a.vocab) apply_top_k(row, a.top_k[s], values);
  if (a.top_p[s] < 1.0f) apply_top_p(row, a.top_p[s], values);
  values.release();
  const double total = find_block_sums(row);
  return pick(row, uniform(a.seeds[s], a.positions[s]) * total);
}

template <class T>
void sample_tokens(const SampleArgs& a) {
  const int64_t blocks = (a.vocab + kBlock - 1) / kBlock;
  const auto sample_rows = [&](int64_t begin, int64_t end) {
    void* memory = malloc(blocks * (sizeof(double) + sizeof(float)));
    if (memory == nullptr) abort();
    double* block_sum = static_cast<double*>(memory);
    float* block_max = reinterpret_cast<float*>(block_sum + blocks);
    for (int64_t s = begin; s < end; ++s) a.out[s] = sample_row<T>(a, s, block_max, block_sum);
    free(memory);
  };
  // With many rows, one thread per row, and the inner loops run in one thread. With few rows, the inner loops
  // divide the vocabulary among the threads.
  if (a.rows >= team_threads()) {
    parallel_for(a.rows, a.vocab, sample_rows);
  } else {
    sample_rows(0, a.rows);
  }
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(sample_tokens, SampleArgs) {
  with_dtype(args.dtype, [&](auto tag) { sample_tokens<decltype(tag)>(args); });
}

ASCEND_VLLM_DEFINE_KERNEL(philox_uniform, UniformArgs) {
  for (int64_t i = 0; i < args.size; ++i) args.out[i] = uniform(args.seeds[i], args.positions[i]);
}

}  // namespace ascend_vllm

#endif

// Drafts behind earlier occurrences of rows' last tokens; see ascend_vllm/ops/ngrams.py.
#include <algorithm>
#include <cstdint>

namespace ascend_vllm {
namespace {

constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio

// M slots, L + 1 tokens of each; R rows, k drafts. NgramTables in Python has the same fields.
struct Ngrams {
  int64_t row_tokens, shortest, longest, pads;
  const int32_t* token_ids;   // [M, L + 1]
  const int64_t* num_tokens;  // [M]
  // A table for each length of n-grams, [longest - shortest + 1, capacity], without gaps. An entry is the index
  // behind the first occurrence of an n-gram, 0 if it is free; entries with equal places follow each other.
  int32_t* const* tables;     // [M]
  const int64_t* capacities;  // [M] powers of two, more than the row's tokens
  int64_t* num_indexed;       // [M] tokens whose n-grams are in the tables
};

struct Row {
  const Ngrams& in;
  const int32_t* tokens;
  int32_t* tables;
  uint64_t capacity;

  // Entry of the n-gram of `length` tokens before `end`, whose hash is given; the entry is 0 if it is not
  // there.
  int32_t& find(int64_t end, int64_t length, uint64_t hash) const {
    int32_t* table = tables + (length - in.shortest) * capacity;
    const int32_t* ngram = tokens + end - length;
    uint64_t place = (hash ^ (hash >> 32)) & (capacity - 1);
    while (table[place] && !std::equal(ngram, ngram + length, tokens + table[place] - length))
      place = (place + 1) & (capacity - 1);
    return table[place];
  }

  // Calls visit(length, hash) for the n-grams before `end`, from short to long ones, as long as it returns
  // true.
  template <class Visit>
  void visit(int64_t end, Visit visit) const {
    uint64_t hash = 0;
    const int64_t longest = std::min(in.longest, end);
    for (int64_t length = 1; length <= longest; ++length) {
      hash = (hash + static_cast<uint32_t>(tokens[end - length]) + 1) * kMultiplier;
      hash ^= hash >> 29;
      if (length >= in.shortest && !visit(length, hash)) return;
    }
  }

  void add(int64_t end) const {
    visit(end, [&](int64_t length, uint64_t hash) {
      int32_t& entry = find(end, length, hash);
      if (!entry) entry = static_cast<int32_t>(end);
      return true;
    });
  }

  // Index behind the first occurrence of the longest n-gram before `end` that has an earlier one; 0: none has.
  int64_t match(int64_t end) const {
    int64_t best = 0;
    visit(end, [&](int64_t length, uint64_t hash) {
      const int64_t found = find(end, length, hash);
      if (found) best = found;
      return found != 0;  // what does not occur does not begin what does
    });
    return best;
  }
};

}  // namespace
}  // namespace ascend_vllm

// Writes drafts, [R, k], of the rows in slots, [R]; unused places get -1. Returns the number of drafts.
extern "C" __attribute__((visibility("default"))) int64_t ascend_vllm_ngram_drafts(
    const ascend_vllm::Ngrams* ngrams, const int64_t* slots, int64_t rows, int32_t* drafts, int64_t k) {
  const ascend_vllm::Ngrams& in = *ngrams;
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = slots[r], end = in.num_tokens[slot];
    const int32_t* tokens = in.token_ids + slot * in.row_tokens;
    const ascend_vllm::Row row{in, tokens, in.tables[slot], static_cast<uint64_t>(in.capacities[slot])};
    // without the last one, which would find itself
    for (int64_t i = in.num_indexed[slot] + 1; i < end; ++i) row.add(i);
    in.num_indexed[slot] = std::max<int64_t>(end - 1, 0);
    const int64_t first = row.match(end);
    for (int64_t i = 0; i < k; ++i) {
      const bool has = first > 0 && (in.pads || first + i < end);
      drafts[r * k + i] = has ? tokens[std::min(first + i, end - 1)] : -1;
      count += has;
    }
  }
  return count;
}

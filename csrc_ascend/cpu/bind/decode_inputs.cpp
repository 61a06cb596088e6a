// The inputs of decoding steps, gathered from the rows' slots, and the tokens that they sample or accept; see
// ascend_vllm/ops/decode_inputs.py.
#include <algorithm>
#include <cstdint>

namespace ascend_vllm {

// M slots, L + 1 tokens and B blocks of each; R rows of a step, T tokens of them, up to C of a
// row. DecodeInputs in Python has the same fields.
struct DecodeInputs {
  int64_t row_tokens, row_blocks, block_size;
  int32_t* token_ids;          // [M, L + 1]
  const int32_t* block_table;  // [M, B]
  const int64_t* num_blocks;   // [M]
  int64_t* computed;           // [M] tokens whose KV is cached
  int64_t* known;              // [M] tokens
  // filled by the caller
  const int64_t* slots;   // [R]
  const int64_t* starts;  // [R] first position of each row, for several tokens of a row
  const int64_t* counts;  // [R] how many, likewise
  int64_t* sampled;       // [T] at each of them; accept makes [R, C] of it
  // results, for as many rows as there are slots
  int64_t* input_ids;     // [T]
  int64_t* positions;     // [T]
  int64_t* slot_mapping;  // [T]
  int64_t* num_tokens;    // [R] tokens of each row, for one token of a row
  int64_t* last_tokens;   // [R] the last one of each row in these, for several tokens of a row
  int32_t* query_start;   // [R + 1] where rows begin, likewise
  int32_t* seq_lens;      // [R]
  int32_t* row_table;     // [R, B], of which the blocks in use are written
};

}  // namespace ascend_vllm

// Returns the length of the longest row, or 0 if a row misses more or less than one token, or room for another
// one.
extern "C" __attribute__((visibility("default"))) int64_t
ascend_vllm_decode_inputs(const ascend_vllm::DecodeInputs* inputs, int64_t rows) {
  const ascend_vllm::DecodeInputs& in = *inputs;
  int64_t longest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = in.slots[r], position = in.computed[slot], length = position + 1;
    const int64_t room = std::min(in.num_blocks[slot] * in.block_size, in.row_tokens - 1);
    if (in.known[slot] != length || length > room) return 0;
    const int32_t* blocks = in.block_table + slot * in.row_blocks;
    in.input_ids[r] = in.token_ids[slot * in.row_tokens + position];
    in.positions[r] = position;
    in.num_tokens[r] = length;
    in.slot_mapping[r] = int64_t{blocks[position / in.block_size]} * in.block_size + position % in.block_size;
    in.seq_lens[r] = static_cast<int32_t>(length);
    std::copy_n(blocks, position / in.block_size + 1, in.row_table + r * in.row_blocks);
    longest = std::max(longest, length);
  }
  return longest;
}

// Adds the token that each row of the last step of one token a row sampled.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_append(
    const ascend_vllm::DecodeInputs* inputs, int64_t rows, const int64_t* sampled) {
  const ascend_vllm::DecodeInputs& in = *inputs;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = in.slots[r];
    in.token_ids[slot * in.row_tokens + in.known[slot]++] = static_cast<int32_t>(sampled[r]);
    ++in.computed[slot];
  }
}

// The same as ascend_vllm_decode_inputs for several tokens of each row; those of positions p, p + 1, … are
// `shift` further in the row. Returns 0 if a row has no blocks or no room for them.
extern "C" __attribute__((visibility("default"))) int64_t
ascend_vllm_several_inputs(const ascend_vllm::DecodeInputs* inputs, int64_t rows, int64_t shift) {
  const ascend_vllm::DecodeInputs& in = *inputs;
  int64_t longest = 0, token = 0;
  in.query_start[0] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = in.slots[r], length = in.starts[r] + in.counts[r];
    if (length > in.num_blocks[slot] * in.block_size || length + shift > in.row_tokens) return 0;
    const int32_t* blocks = in.block_table + slot * in.row_blocks;
    const int32_t* tokens = in.token_ids + slot * in.row_tokens + shift;
    for (int64_t position = in.starts[r]; position < length; ++position, ++token) {
      in.input_ids[token] = tokens[position];
      in.positions[token] = position;
      in.slot_mapping[token] =
          int64_t{blocks[position / in.block_size]} * in.block_size + position % in.block_size;
    }
    in.last_tokens[r] = token - 1;
    in.query_start[r + 1] = static_cast<int32_t>(token);
    in.seq_lens[r] = static_cast<int32_t>(length);
    std::copy_n(blocks, (length - 1) / in.block_size + 1, in.row_table + r * in.row_blocks);
    longest = std::max(longest, length);
  }
  return longest;
}

// Adds what rows sampled at their last tokens and drafts, up to the first one that differs from
// the draft. `sampled` becomes [R, width], where `rejected` stands behind that one and `padding`
// where a row has no drafts.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_accept(
    const ascend_vllm::DecodeInputs* inputs, int64_t rows, int64_t width, int64_t rejected, int64_t padding) {
  const ascend_vllm::DecodeInputs& in = *inputs;
  int64_t token = 0;
  for (int64_t r = 0; r < rows; ++r) token += in.counts[r];
  // backwards, since the rows move apart
  for (int64_t r = rows; r-- > 0;) {
    const int64_t slot = in.slots[r], count = in.counts[r];
    token -= count;
    int64_t* line = in.sampled + r * width;
    std::copy_backward(in.sampled + token, in.sampled + token + count, line + count);
    std::fill(line + count, line + width, padding);
    int32_t* tokens = in.token_ids + slot * in.row_tokens + in.known[slot];
    int64_t taken = 1;
    while (taken < count && line[taken - 1] == tokens[taken - 1]) ++taken;
    std::fill(line + taken, line + count, rejected);
    // below 0 where all tokens were forbidden: the next step may already be scheduled and needs a valid id
    for (int64_t i = 0; i < taken; ++i) tokens[i] = static_cast<int32_t>(std::max<int64_t>(line[i], 0));
    in.known[slot] += taken;
    in.computed[slot] = in.known[slot] - 1;
  }
}

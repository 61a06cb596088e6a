// The inputs of decoding steps, gathered from the rows' slots; see ascend_vllm/ops/decode_inputs.py.
#include <algorithm>
#include <cstdint>

namespace ascend_vllm {

// M slots, L + 1 tokens and B blocks of each; R rows of a step. DecodeInputs in Python has the same fields.
struct DecodeInputs {
  int64_t row_tokens, row_blocks, block_size;
  const int32_t* token_ids;    // [M, L + 1]
  const int32_t* block_table;  // [M, B]
  const int64_t* num_blocks;   // [M]
  const int64_t* computed;     // [M] tokens whose KV is cached
  const int64_t* known;        // [M] tokens
  // results, for as many rows as there are slots
  const int64_t* slots;   // [R], filled by the caller
  int64_t* input_ids;     // [R]
  int64_t* positions;     // [R]
  int64_t* slot_mapping;  // [R]
  int32_t* seq_lens;      // [R]
  int32_t* row_table;     // [R, B], of which the blocks in use are written
};

}  // namespace ascend_vllm

// Returns the length of the longest row, or 0 if a row misses more or less than one token, or blocks for it.
extern "C" __attribute__((visibility("default"))) int64_t
ascend_vllm_decode_inputs(const ascend_vllm::DecodeInputs* inputs, int64_t rows) {
  const ascend_vllm::DecodeInputs& in = *inputs;
  int64_t longest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = in.slots[r], position = in.computed[slot], length = position + 1;
    if (in.known[slot] != length || length > in.num_blocks[slot] * in.block_size) return 0;
    const int32_t* blocks = in.block_table + slot * in.row_blocks;
    in.input_ids[r] = in.token_ids[slot * in.row_tokens + position];
    in.positions[r] = position;
    in.slot_mapping[r] = int64_t{blocks[position / in.block_size]} * in.block_size + position % in.block_size;
    in.seq_lens[r] = static_cast<int32_t>(length);
    std::copy_n(blocks, position / in.block_size + 1, in.row_table + r * in.row_blocks);
    longest = std::max(longest, length);
  }
  return longest;
}

// Keeps hidden states for EAGLE heads; see ascend_vllm/ops/kept_states.py.
#include <cstdint>
#include <cstring>

// One state of `bytes` of each of `rows` slots, which is copied behind those that are kept of the slot:
// `counts` of at most `most`, for the slots below `keeping`. Where there is no room, the slot's entry of
// `positions` becomes `lapsed`; slots with this entry keep nothing.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_keep_states(
    const int64_t* slots, int64_t rows, const char* states, int64_t bytes, char* kept, int64_t* counts,
    int64_t* positions, int64_t keeping, int64_t most, int64_t lapsed) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = slots[r];
    if (positions[slot] == lapsed) continue;
    if (slot >= keeping || counts[slot] >= most) {
      positions[slot] = lapsed;
      continue;
    }
    std::memcpy(kept + (slot * most + counts[slot]) * bytes, states + r * bytes, bytes);
    ++counts[slot];
  }
}

// Keeps hidden states for EAGLE heads; see ascend_vllm/ops/kept_states.py.
#include <cstdint>
#include <cstring>

namespace {

struct KeptStates {
  const int64_t* slots;                  // [rows]
  char* kept;                            // [keeping, most] states, of the slots below `keeping`
  int64_t* counts;                       // by slot: states that are kept
  int64_t* positions;                    // by slot
  int64_t bytes, keeping, most, lapsed;  // `bytes` of a state
};

}  // namespace

// Copies a state of each row behind those that are kept of its slot. Where there is no room, the slot's entry
// of `positions` becomes `lapsed`; slots with this entry keep nothing.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_keep_states(const KeptStates* a,
                                                                               int64_t rows,
                                                                               const char* states) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = a->slots[r];
    if (a->positions[slot] == a->lapsed) continue;
    if (slot >= a->keeping || a->counts[slot] >= a->most) {
      a->positions[slot] = a->lapsed;
      continue;
    }
    std::memcpy(a->kept + (slot * a->most + a->counts[slot]) * a->bytes, states + r * a->bytes, a->bytes);
    ++a->counts[slot];
  }
}

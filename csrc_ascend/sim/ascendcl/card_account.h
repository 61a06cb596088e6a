// The account of the cards' memory that processes share: a file with a row for each process, which
// ASCEND_SIM_CARDS names. A process holds a lock on its row for as long as it lives, so that a row without one,
// also after SIGKILL, counts no more. Without the variable a process has its devices alone.
#pragma once

#include <cstddef>

namespace ascend_sim {

// What processes use of a device's memory; no other process changes it for as long as this object lives. Made
// under the memory lock.
class CardUse {
 public:
  // `device` is a number as this process sees it.
  explicit CardUse(int device);
  ~CardUse();
  CardUse(const CardUse&) = delete;

  std::size_t by_others() const;
  void set_own(std::size_t bytes);

 private:
  int card_ = -1;
};

}  // namespace ascend_sim

#include "card_account.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "state.h"

namespace ascend_sim {
namespace {

constexpr int kRows = 256;
constexpr int kCards = 64;

// Bytes that a process uses of each card. Zeros are a row of nobody.
struct Row {
  std::uint64_t used[kCards];
};

// Byte i of the file is locked by the process of row i; the one behind them by whoever reads or writes rows.
constexpr int kGuard = kRows;

[[noreturn]] void fail(const char* what) {
  throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR,
                     std::string("ASCEND_SIM_CARDS: ") + what + ": " + std::strerror(errno));
}

class Account {
 public:
  Account() {
    const char* path = options().cards.c_str();
    file_ = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0 || ftruncate(file_, sizeof(Row) * kRows) != 0) fail(path);
    void* mapped = mmap(nullptr, sizeof(Row) * kRows, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) fail("mmap");
    rows_ = static_cast<Row*>(mapped);
  }

  void enter() {
    lock(kGuard, F_WRLCK, F_SETLKW);
    // a fork has the memory of its parent, but not its locks
    if (owner_ != getpid()) take_row();
  }
  void leave() { lock(kGuard, F_UNLCK, F_SETLK); }

  std::size_t by_others(int card) {
    std::size_t sum = 0;
    for (int i = 0; i < kRows; ++i) {
      if (i == own_ || rows_[i].used[card] == 0) continue;
      if (is_held(i)) {
        sum += rows_[i].used[card];
      } else {
        rows_[i] = {};
      }
    }
    return sum;
  }
  void set_own(int card, std::size_t bytes) { rows_[own_].used[card] = bytes; }

 private:
  // Locks of this kind are a process's own, and end with it.
  bool lock(int place, short kind, int command) {
    struct flock range{};
    range.l_type = kind;
    range.l_whence = SEEK_SET;
    range.l_start = place;
    range.l_len = 1;
    while (fcntl(file_, command, &range) != 0) {
      if (errno == EACCES || errno == EAGAIN) return false;
      if (errno != EINTR) fail("fcntl");
    }
    return command != F_GETLK || range.l_type == F_UNLCK;
  }
  bool is_held(int row) { return !lock(row, F_WRLCK, F_GETLK); }

  void take_row() {
    for (own_ = 0; own_ < kRows; ++own_) {
      if (!lock(own_, F_WRLCK, F_SETLK)) continue;
      rows_[own_] = {};
      owner_ = getpid();
      return;
    }
    throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR,
                       "ASCEND_SIM_CARDS: more than " + std::to_string(kRows) + " processes");
  }

  int file_ = -1;
  Row* rows_ = nullptr;
  int own_ = -1;
  pid_t owner_ = 0;
};

Account& account() {
  static Account once;
  return once;
}

}  // namespace

CardUse::CardUse(int device) {
  if (options().cards.empty()) return;
  const int card = card_of(device);
  if (card >= kCards)
    throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR, "ASCEND_SIM_CARDS: card " + std::to_string(card) +
                                                        " is beyond the " + std::to_string(kCards) +
                                                        " of an account");
  account().enter();
  card_ = card;
}

CardUse::~CardUse() {
  if (card_ >= 0) account().leave();
}

std::size_t CardUse::by_others() const { return card_ < 0 ? 0 : account().by_others(card_); }

void CardUse::set_own(std::size_t bytes) {
  if (card_ >= 0) account().set_own(card_, bytes);
}

}  // namespace ascend_sim

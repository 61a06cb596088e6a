// A communicator of simulated HCCL: processes of one machine over shared memory.
//
// The memory is anonymous: the first rank creates it with memfd_create, and the root info tells the others
// where to open it, so it is freed however the processes end. Every rank locks its byte of the memory's file;
// the system releases the lock when the process ends, which the others detect.
#pragma once

#include <hccl/hccl.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "sim/runtime.h"

namespace ascend_sim::hccl {

constexpr uint32_t kMaxRanks = 32;
constexpr size_t kSlotBytes = 1 << 20;
constexpr size_t kFrameBytes = 1 << 18;
// that a communicator takes of a device for each other rank: its data is there, and it has been read
constexpr size_t kNotifiesOfAPeer = 2;

// A failure with the interface's error code.
struct Failure : std::runtime_error {
  Failure(HcclResult result, const std::string& text) : std::runtime_error(text), code(result) {}
  HcclResult code;
};

// A rank's description of its current call; all ranks must agree on the call, dtype, operation, root and, where
// it must be equal, count.
struct Call {
  char function[32];
  int32_t dtype, operation;
  uint32_t root;
  uint64_t count;
  std::array<uint64_t, kMaxRanks> counts;  // bytes for each rank, where they differ
};

// One message under way from a rank to another, in frames.
struct Channel {
  std::atomic<uint32_t> full;
  int32_t dtype;
  uint64_t count;
  uint32_t bytes;
  char frame[kFrameBytes];
};

struct Shared {
  std::atomic<uint32_t> joined, arrived, generation, broken;
  uint32_t ranks;
  char reason[512];
  Call calls[kMaxRanks];
  char slots[kMaxRanks][kSlotBytes];
  Channel channels[kMaxRanks][kMaxRanks];
};

class Communicator {
 public:
  // Joins and waits for the others. Throws Failure if they do not come (HCCL_CONNECT_TIMEOUT seconds, 120).
  Communicator(const HcclRootInfo& root, uint32_t ranks, uint32_t rank, std::string name, int timeout);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  const std::string& name() const { return name_; }
  HcclResult async_error() const { return async_error_; }

  // Runs one collective: agrees on `call`, then runs `body`. A failure breaks the communicator for all.
  void collective(const Call& call, const std::function<void()>& body);
  // Runs one exchange of messages; it agrees on nothing beforehand.
  void messages(const std::function<void()>& body);

  void barrier();
  const Call& call_of(uint32_t rank) const { return shared_->calls[rank]; }
  char* slot(uint32_t rank) const { return shared_->slots[rank]; }
  Channel& channel(uint32_t from, uint32_t to) const { return shared_->channels[from][to]; }

  // Waits until `ready`. Throws if the communicator breaks, a rank ends, or HCCL_EXEC_TIMEOUT seconds (1836)
  // pass.
  void wait(const std::function<bool()>& ready, const std::string& what);

 private:
  void guarded(const std::function<void()>& body);
  void wait_for(const std::function<bool()>& ready, const std::string& what, int seconds);
  void require_alive();
  void require_same_call(const Call& mine);

  uint32_t ranks_, rank_;
  std::string name_;
  int timeout_;
  Notifies notifies_;
  int file_ = -1;
  Shared* shared_ = nullptr;
  std::mutex mutex_;
  std::atomic<HcclResult> async_error_{HCCL_SUCCESS};
};

// Creates the memory of a new communicator; writes its location to the root info.
void make_root_info(HcclRootInfo* root);

size_t element_size(HcclDataType dtype);

}  // namespace ascend_sim::hccl

#include "sim/hccl/communicator.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ascend_sim::hccl {
namespace {

struct Place {
  char magic[16];
  int64_t process;
  int32_t file;
  uint64_t number;
};
static_assert(sizeof(Place) <= HCCL_ROOT_INFO_BYTES);
constexpr char kMagic[16] = "ascend-sim hccl";

int seconds_of(const char* name, int fallback) {
  const char* text = std::getenv(name);
  const int value = text ? std::atoi(text) : 0;
  return value > 0 ? value : fallback;
}

[[noreturn]] void fail_system(const std::string& what) {
  throw Failure(HCCL_E_SYSCALL, what + ": " + std::strerror(errno));
}

struct flock byte_lock(uint32_t rank, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

// A file description of its own for every rank: locks belong to it and end with it.
int open_memory(const HcclRootInfo& root) {
  Place place;
  std::memcpy(&place, root.internal, sizeof place);
  if (std::memcmp(place.magic, kMagic, sizeof kMagic) != 0) {
    throw Failure(HCCL_E_PARA, "rootInfo: it was not made by HcclGetRootInfo of the simulator");
  }
  const std::string path = "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) fail_system("rootInfo: the memory of rank 0's process cannot be opened at " + path);
  return file;
}

}  // namespace

void make_root_info(HcclRootInfo* root) {
  static std::atomic<uint64_t> number{0};
  // The descriptor stays open until the process ends, since other ranks may join at any time.
  const int file = memfd_create("ascend-sim-hccl", MFD_CLOEXEC);
  if (file < 0) fail_system("memfd_create");
  if (ftruncate(file, sizeof(Shared)) != 0) fail_system("ftruncate");
  Place place{};
  std::memcpy(place.magic, kMagic, sizeof kMagic);
  place.process = getpid();
  place.file = file;
  place.number = number++;
  std::memset(root->internal, 0, sizeof root->internal);
  std::memcpy(root->internal, &place, sizeof place);
}

Communicator::Communicator(const HcclRootInfo& root, uint32_t ranks, uint32_t rank, std::string name,
                           int timeout)
    : ranks_(ranks),
      rank_(rank),
      name_(std::move(name)),
      timeout_(timeout),
      notifies_(current_device(), kNotifiesOfAPeer * (ranks - 1)) {
  if (timeout_ <= 0) timeout_ = seconds_of("HCCL_EXEC_TIMEOUT", 1836);
  file_ = open_memory(root);
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) fail_system("mmap");
  shared_ = static_cast<Shared*>(memory);
  struct flock lock = byte_lock(rank, F_WRLCK);
  if (fcntl(file_, F_OFD_SETLK, &lock) != 0) {
    throw Failure(HCCL_E_PARA, "rank: rank " + std::to_string(rank) + " has joined this communicator already");
  }
  if (rank == 0) shared_->ranks = ranks;
  shared_->joined.fetch_add(1);
  wait_for([this] { return shared_->joined.load() >= ranks_; }, "all ranks to join",
           seconds_of("HCCL_CONNECT_TIMEOUT", 120));
  barrier();
  if (shared_->ranks != ranks) {
    throw Failure(HCCL_E_PARA, "nRanks: " + std::to_string(ranks) + " differs from " +
                                   std::to_string(shared_->ranks) + " of rank 0");
  }
}

Communicator::~Communicator() {
  if (shared_) munmap(shared_, sizeof(Shared));
  if (file_ >= 0) close(file_);
}

// Ranks that have joined hold their lock; before all have, a missing one is only late.
void Communicator::require_alive() {
  if (shared_->joined.load() < ranks_) return;
  for (uint32_t other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    struct flock lock = byte_lock(other, F_WRLCK);
    if (fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) {
      throw Failure(HCCL_E_REMOTE, "rank " + std::to_string(other) + " has left the communicator or ended");
    }
  }
}

void Communicator::wait_for(const std::function<bool()>& ready, const std::string& what, int seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(seconds);
  auto next_look = Clock::now() + std::chrono::milliseconds(20);
  for (int round = 0; !ready(); ++round) {
    if (shared_->broken.load()) {
      // The failed rank may be ahead of this one. Then this rank need not wait, and finds the error itself.
      if (ready()) return;
      throw Failure(HCCL_E_INTERNAL, std::string("another rank failed: ") + shared_->reason);
    }
    if (round < 64) {
      sched_yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    const auto now = Clock::now();
    if (now < next_look) continue;
    next_look = now + std::chrono::milliseconds(20);
    // A rank may have exited after it did its part, so check again before reporting it as missing.
    try {
      require_alive();
    } catch (const Failure&) {
      if (ready()) return;
      throw;
    }
    if (now > deadline) {
      throw Failure(HCCL_E_TIMEOUT, "waited " + std::to_string(seconds) + " s for " + what);
    }
  }
}

void Communicator::wait(const std::function<bool()>& ready, const std::string& what) {
  wait_for(ready, what, timeout_);
}

void Communicator::barrier() {
  const uint32_t generation = shared_->generation.load();
  if (shared_->arrived.fetch_add(1) + 1 == ranks_) {
    shared_->arrived.store(0);
    shared_->generation.fetch_add(1);
    return;
  }
  wait([&] { return shared_->generation.load() != generation; }, "the other ranks");
}

void Communicator::guarded(const std::function<void()>& body) {
  const std::lock_guard<std::mutex> guard(mutex_);
  try {
    if (shared_->broken.load())
      throw Failure(HCCL_E_INTERNAL, std::string("another rank failed: ") + shared_->reason);
    body();
  } catch (const std::exception& error) {
    const auto* failure = dynamic_cast<const Failure*>(&error);
    async_error_ = failure ? failure->code : HCCL_E_INTERNAL;
    if (shared_->broken.exchange(2) == 0) {
      std::strncpy(shared_->reason, error.what(), sizeof shared_->reason - 1);
      shared_->broken.store(1);
    }
    throw;
  }
}

void Communicator::require_same_call(const Call& mine) {
  for (uint32_t other = 0; other < ranks_; ++other) {
    const Call& theirs = shared_->calls[other];
    const auto differs = [&](const char* argument, auto here, auto there) {
      if (here == there) return;
      throw Failure(HCCL_E_PARA, std::string(mine.function) + ": " + argument + ": " + std::to_string(here) +
                                     " on rank " + std::to_string(rank_) + " but " + std::to_string(there) +
                                     " on rank " + std::to_string(other));
    };
    if (std::strcmp(mine.function, theirs.function) != 0) {
      throw Failure(HCCL_E_PARA, std::string(mine.function) + ": rank " + std::to_string(other) + " is in " +
                                     theirs.function);
    }
    differs("dataType", mine.dtype, theirs.dtype);
    differs("op", mine.operation, theirs.operation);
    differs("root", mine.root, theirs.root);
    differs("count", mine.count, theirs.count);
  }
}

void Communicator::collective(const Call& call, const std::function<void()>& body) {
  guarded([&] {
    shared_->calls[rank_] = call;
    barrier();
    require_same_call(call);
    body();
    barrier();
  });
}

void Communicator::messages(const std::function<void()>& body) { guarded(body); }

size_t element_size(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace ascend_sim::hccl

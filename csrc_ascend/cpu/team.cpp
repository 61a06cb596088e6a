#include "cpu/team.h"

#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <thread>

namespace ascend_vllm {
namespace {

// How long an idle thread spins before it sleeps: a little longer than the pause between two kernels of a step.
constexpr int64_t kSpinNanoseconds = 100'000;
// Spins between two checks of the clock, or calls of sched_yield.
constexpr int kSpinsPerCheck = 64;
// An index above all parts of any job, so that no thread takes a part while a job is being changed.
constexpr uint32_t kClosed = 0x80000000u;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` does nothing on most processors
#endif
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

class Team {
 public:
  // Whether this thread runs a part, or waits for the parts of its job.
  static thread_local bool is_inside;

  bool is_busy() const { return busy_.load(std::memory_order_relaxed); }
  bool try_acquire() { return !busy_.exchange(true, std::memory_order_acquire); }
  void release() { busy_.store(false, std::memory_order_release); }

  void run(int64_t parts, int threads, void (*part)(const void*, int64_t, int64_t), const void* context) {
    grow(threads);
    const uint32_t job = ++jobs_;
    // No part can be taken until all fields are written: a thread that has read a mixture of jobs fails in
    // `take`. Released and acquired one by one: who sees a new field must see the closed word, too, which Arm
    // processors could otherwise show later.
    word_.store(uint64_t{job} << 32 | kClosed, std::memory_order_seq_cst);
    part_.store(part, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    parts_.store(static_cast<uint32_t>(parts), std::memory_order_release);
    threads_.store(threads, std::memory_order_release);
    done_.store(0, std::memory_order_relaxed);
    word_.store(uint64_t{job} << 32, std::memory_order_seq_cst);
    posted_.store(job, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    while (take(0)) {
    }
    wait_for(static_cast<uint32_t>(parts));
  }

 private:
  // Runs a part, if one is left; false if not, or if the job does not use this thread.
  bool take(int64_t thread) {
    uint64_t word = word_.load(std::memory_order_acquire);
    while (true) {
      const uint32_t index = static_cast<uint32_t>(word);
      const auto part = part_.load(std::memory_order_acquire);
      const void* context = context_.load(std::memory_order_acquire);
      if (index >= parts_.load(std::memory_order_acquire) ||
          thread >= threads_.load(std::memory_order_acquire)) {
        return false;
      }
      // Succeeds only if the job has not changed and the part is still free.
      if (word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        part(context, index, thread);
        done_.fetch_add(1, std::memory_order_acq_rel);
        return true;
      }
    }
  }

  void wait_for(uint32_t parts) {
    for (int spins = 1; done_.load(std::memory_order_acquire) < parts; ++spins) {
      // The thread with the last part may be waiting for this core.
      spins % kSpinsPerCheck == 0 ? static_cast<void>(sched_yield()) : relax();
    }
  }

  void work(int64_t thread) {
    is_inside = true;
    uint32_t seen = 0;
    while (true) {
      while (take(thread)) {
      }
      seen = wait_for_job(seen);
    }
  }

  // Waits for a job after `seen`; returns its number.
  uint32_t wait_for_job(uint32_t seen) {
    const int64_t end = now() + kSpinNanoseconds;
    for (int spins = 1;; ++spins) {
      const uint32_t posted = posted_.load(std::memory_order_acquire);
      if (posted != seen) return posted;
      if (spins % kSpinsPerCheck == 0 && now() > end) break;
      relax();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    uint32_t posted = posted_.load(std::memory_order_seq_cst);
    while (posted == seen) {
      syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      posted = posted_.load(std::memory_order_seq_cst);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return posted;
  }

  void wake() { syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
  uint32_t* address() { return reinterpret_cast<uint32_t*>(&posted_); }

  void grow(int threads) {
    for (; num_workers_ < threads - 1; ++num_workers_) {
      std::thread([this, thread = num_workers_ + 1] { work(thread); }).detach();
    }
  }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  // number of the job in the upper half, index of its next part in the lower
  alignas(64) std::atomic<uint64_t> word_{uint64_t{kClosed}};
  alignas(64) std::atomic<uint32_t> done_{0};
  // number of the last job that was started; idle threads wait for it to change
  alignas(64) std::atomic<uint32_t> posted_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<void (*)(const void*, int64_t, int64_t)> part_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> parts_{0};
  std::atomic<int> threads_{0};
  std::atomic<bool> busy_{false};
  uint32_t jobs_ = 0;
  int num_workers_ = 0;
};

thread_local bool Team::is_inside = false;

std::atomic<Team*> current{nullptr};

// Never freed: its threads use it until the process ends.
Team& team() {
  Team* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto* made = new Team;
  if (current.compare_exchange_strong(found, made)) {
    // a forked child has none of the threads
    pthread_atfork(nullptr, nullptr, [] { current.store(new Team); });
    return *made;
  }
  delete made;
  return *found;
}

}  // namespace

int team_threads() { return Team::is_inside || team().is_busy() ? 1 : omp_get_max_threads(); }

void run_team(int64_t parts, int threads, void (*part)(const void*, int64_t, int64_t), const void* context) {
  Team& shared = team();
  if (threads <= 1 || Team::is_inside || !shared.try_acquire()) {
    for (int64_t index = 0; index < parts; ++index) part(context, index, 0);
    return;
  }
  Team::is_inside = true;
  shared.run(parts, threads, part, context);
  Team::is_inside = false;
  shared.release();
}

}  // namespace ascend_vllm

// One simulated vector core of an Ascend chip (architecture 2201: 910B, 910_93) and the order of its pipes.
//
// A core executes a kernel's block in one thread and in program order, so all values are those of program
// order. The hardware's out-of-order execution is tracked separately: each instruction belongs to a pipe (MTE2
// copies into the unified buffer, V computes, MTE3 copies out, S is the scalar unit), pipes run concurrently,
// and only event flags, queues and barriers order them. For every 32-byte block of memory the last writing and
// reading instructions are recorded; an access that is not ordered after the one it depends on is a violation,
// even though its value is right here. The rules are those of Ascend C's programming guide; speed and bank
// conflicts are not simulated.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

namespace ascend_sim::ascendc {

constexpr int kNumPipes = PIPE_ALL;
constexpr std::size_t kBlockBytes = 32;
constexpr std::uint32_t kAllBytes = 0xFFFFFFFF;  // of a block
// The unified buffer holds 192 KiB, of which the toolchain keeps 256 bytes.
constexpr std::size_t kUnifiedBufferBytes = 192 * 1024 - 256;

// An error of a kernel; the message names the call.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void violate(const std::string& call, const std::string& why) {
  throw Violation(call + ": " + why);
}

inline void require(bool condition, const std::string& call, const std::string& why) {
  if (!condition) violate(call, why);
}

inline const char* name_of(pipe_t pipe) {
  static constexpr const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};
  return names[pipe];
}

// Number of instructions of each pipe that are known to have finished.
using Clock = std::array<std::uint64_t, kNumPipes>;

inline void join(Clock& into, const Clock& other) {
  for (int pipe = 0; pipe < kNumPipes; ++pipe) into[pipe] = std::max(into[pipe], other[pipe]);
}

// The last accesses to a block of memory: to the whole block in the unified buffer; in global memory, where
// copies may end at any byte, to the bytes of the masks, a bit for each.
struct BlockState {
  pipe_t writer = PIPE_S;
  std::uint64_t written = 0;  // number of the writing instruction in its pipe; 0: none
  Clock read{};               // of each pipe, its last reading instruction
  std::uint32_t written_bytes = 0, read_bytes = 0;
};

// The core that wrote each byte of a contiguous range in this launch; -1: none.
using Writers = std::vector<int>;

// The global memory that the host passed to a launch; kernels may access no other.
struct GlobalBuffer {
  std::uint8_t* begin;
  std::size_t bytes;
  bool writable;
  Writers writers;
};

// What a launch did, over all cores: bytes copied into and out of the unified buffer, instructions of the
// vector unit and their repeats of 256 bytes, and accesses of the scalar unit.
struct Work {
  std::uint64_t bytes_in = 0, bytes_out = 0, instructions = 0, repeats = 0, scalars = 0;
};

// State shared by all cores of a launch.
class GlobalMemory {
 public:
  Work work;

  // Whether memory that was not passed may be accessed: `pointer`, `bytes`.
  using Rule = std::function<bool(const void*, std::size_t)>;

  GlobalMemory() = default;
  // For launches that get addresses only.
  explicit GlobalMemory(Rule rule) : rule_(std::move(rule)) {}

  void add(void* begin, std::size_t bytes, bool writable) {
    buffers_.push_back({static_cast<std::uint8_t*>(begin), bytes, writable, Writers(bytes, -1)});
  }

  // Launches on a stream are ordered, so writes of earlier ones are visible to all cores.
  void begin_launch() {
    for (GlobalBuffer& buffer : buffers_) std::fill(buffer.writers.begin(), buffer.writers.end(), -1);
    pages_.clear();
  }

  // Raises Violation: the bytes are not all in one buffer, may not be written, or another core has written
  // them, which nothing orders within a launch. `is_sum`: atomic addition, in which cores may meet.
  void check(const void* pointer, std::size_t bytes, bool is_write, bool is_sum, int core, const char* call) {
    if (bytes == 0) return;
    const auto* begin = static_cast<const std::uint8_t*>(pointer);
    for (GlobalBuffer& buffer : buffers_)
      if (begin >= buffer.begin && begin + bytes <= buffer.begin + buffer.bytes) {
        if (is_write && !buffer.writable) violate(call, "this global memory is an input of the kernel");
        return meet(buffer.writers, begin - buffer.begin, bytes, is_write && !is_sum, is_sum, core, call);
      }
    if (!rule_ || !rule_(pointer, bytes))
      violate(call, std::to_string(bytes) + " bytes outside of the global memory that the kernel was given");
    const auto first = reinterpret_cast<std::uintptr_t>(pointer);
    for (auto at = first; at < first + bytes;) {
      const auto end = std::min<std::uintptr_t>(first + bytes, (at / kPageBytes + 1) * kPageBytes);
      const bool marks = is_write && !is_sum;
      auto page = pages_.find(at / kPageBytes);
      if (page == pages_.end() && marks) page = pages_.emplace(at / kPageBytes, Writers(kPageBytes, -1)).first;
      if (page != pages_.end()) meet(page->second, at % kPageBytes, end - at, marks, is_sum, core, call);
      at = end;
    }
  }

 private:
  static constexpr std::size_t kPageBytes = 4096;

  // Records an access of a core to bytes first … first+bytes-1 of the range of `writers`.
  static void meet(Writers& writers, std::size_t first, std::size_t bytes, bool marks, bool is_sum, int core,
                   const char* call) {
    for (std::size_t byte = first; byte < first + bytes; ++byte) {
      const int writer = writers[byte];
      if (writer != -1 && writer != core && !is_sum)
        violate(call, "core " + std::to_string(core) + " touches global memory that core " +
                          std::to_string(writer) + " wrote in the same launch");
      if (marks) writers[byte] = core;
    }
  }

  std::vector<GlobalBuffer> buffers_;
  Rule rule_;
  // writers of the memory that the rule allows, by address / kPageBytes
  std::unordered_map<std::uintptr_t, Writers> pages_;
};

// A range that an instruction reads or writes.
struct Access {
  const void* pointer;
  std::size_t bytes;
  bool is_write;
};

class Core {
 public:
  Core(int index, int count, GlobalMemory& memory)
      : index_(index),
        count_(count),
        memory_(memory),
        written_(kUnifiedBufferBytes),
        local_blocks_(kUnifiedBufferBytes / kBlockBytes) {}

  int index() const { return index_; }
  int count() const { return count_; }
  std::uint8_t* buffer() { return buffer_.bytes; }
  GlobalMemory& memory() { return memory_; }

  // Allocates part of the unified buffer for a queue or a TBuf; it is never freed.
  std::size_t allocate(std::size_t bytes, const std::string& call) {
    require(bytes > 0 && bytes % kBlockBytes == 0, call,
            std::to_string(bytes) + " bytes: a multiple of 32 is due");
    require(used_ + bytes <= kUnifiedBufferBytes, call,
            "the unified buffer is full: " + std::to_string(used_) + " bytes are taken, " +
                std::to_string(bytes) + " more wanted, " + std::to_string(kUnifiedBufferBytes) + " there");
    return std::exchange(used_, used_ + bytes);
  }

  bool owns(const void* pointer) const {
    const auto* byte = static_cast<const std::uint8_t*>(pointer);
    return byte >= buffer_.bytes && byte < buffer_.bytes + kUnifiedBufferBytes;
  }

  // Counts an instruction of a pipe and checks that it is ordered after the accesses it depends on.
  void execute(pipe_t pipe, const char* call, std::initializer_list<Access> accesses) {
    execute(pipe, call, accesses.begin(), accesses.size());
  }

  void execute(pipe_t pipe, const char* call, const Access* first, std::size_t count) {
    const std::uint64_t number = ++issued_[pipe];
    count_work(pipe, first, count);
    if (pipe == PIPE_S) known_[PIPE_S][PIPE_S] = number;  // the scalar unit waits for itself
    for (const Access* access = first; access != first + count; ++access) check(pipe, call, *access);
    for (const Access* access = first; access != first + count; ++access) mark(pipe, number, *access);
  }

  void barrier(pipe_t pipe) {
    if (pipe != PIPE_ALL) {
      known_[pipe][pipe] = issued_[pipe];
      return;
    }
    for (int each = 0; each < kNumPipes; ++each) join(known_[each], issued_);
  }

  // A flag: everything that `from` has issued so far.
  Clock snapshot(pipe_t from) const {
    Clock clock = known_[from];
    clock[from] = issued_[from];
    return clock;
  }

  void wait(pipe_t to, const Clock& clock) { join(known_[to], clock); }

  void set_flag(pipe_t from, pipe_t to, int id) {
    check_flag("SetFlag", id);
    const auto [_, is_new] = flags_.emplace(std::array<int, 3>{from, to, id}, snapshot(from));
    require(is_new, "SetFlag", describe(from, to, id) + " is set already and nobody waited for it");
  }

  void wait_flag(pipe_t from, pipe_t to, int id) {
    check_flag("WaitFlag", id);
    const auto flag = flags_.find({from, to, id});
    require(flag != flags_.end(), "WaitFlag", describe(from, to, id) + " was never set: the core hangs");
    wait(to, flag->second);
    flags_.erase(flag);
  }

  // Raises Violation: the kernel ends with flags that were set and not waited for.
  void finish() const {
    for (const auto& [key, _] : flags_)
      violate("end of kernel",
              describe(pipe_t(key[0]), pipe_t(key[1]), key[2]) + " is set and nobody waited for it");
  }

  bool is_summing = false;  // SetAtomicAdd

 private:
  void count_work(pipe_t pipe, const Access* first, std::size_t count) {
    Work& work = memory_.work;
    if (pipe == PIPE_S) ++work.scalars;
    if (pipe == PIPE_MTE2) work.bytes_in += first->bytes;
    if (pipe == PIPE_MTE3) work.bytes_out += first->bytes;
    if (pipe != PIPE_V) return;
    std::size_t largest = 0, bytes[2] = {0, 0};
    // an instruction may have several ranges of an operand: all that it reads or all that it writes, halved for
    // two sources
    for (const Access* access = first; access != first + count; ++access) {
      bytes[access->is_write] += access->bytes;
      largest = std::max(largest, access->bytes);
    }
    ++work.instructions;
    work.repeats += (std::max({largest, bytes[1], bytes[0] / 2}) + 255) / 256;
  }

  static std::string describe(pipe_t from, pipe_t to, int id) {
    return std::string("event ") + name_of(from) + "_" + name_of(to) + " " + std::to_string(id);
  }

  static void check_flag(const char* call, int id) {
    require(id >= 0 && id < 8, call, "event id " + std::to_string(id) + " is not in [0, 8)");
  }

  void check(pipe_t pipe, const char* call, const Access& access) {
    const bool is_local = owns(access.pointer);
    if (is_local)
      check_local(call, access);
    else
      memory_.check(access.pointer, access.bytes, access.is_write, is_summing, index_, call);
    for_each_block(access, [&](const BlockState& state, std::uint32_t bytes) {
      const bool meets_reads = access.is_write && (state.read_bytes & bytes) != 0;
      for (int reader = 0; meets_reads && reader < kNumPipes; ++reader)
        if (reader != pipe && state.read[reader] > known_[pipe][reader])
          violate(call, std::string("pipe ") + name_of(pipe) + " overwrites what pipe " +
                            name_of(pipe_t(reader)) + " may still be reading: " + due(pipe_t(reader), pipe));
      if ((state.written_bytes & bytes) != 0 && state.written > known_[pipe][state.writer])
        violate(call, std::string("pipe ") + name_of(pipe) + (access.is_write ? " overwrites" : " reads") +
                          " what pipe " + name_of(state.writer) +
                          " may still be writing: " + due(state.writer, pipe));
    });
  }

  static std::string due(pipe_t from, pipe_t to) {
    if (from == to) return std::string("PipeBarrier<PIPE_") + name_of(to) + "> is due";
    return std::string("an event ") + name_of(from) + "_" + name_of(to) + " or a queue is due";
  }

  void check_local(const char* call, const Access& access) {
    const std::size_t first = static_cast<const std::uint8_t*>(access.pointer) - buffer_.bytes;
    if (first + access.bytes > used_) violate(call, "beyond what is allocated of the unified buffer");
    if (access.is_write) return;
    if (std::memchr(written_.data() + first, 0, access.bytes) != nullptr)
      violate(call, "reads a part of the unified buffer that nobody has written");
  }

  void mark(pipe_t pipe, std::uint64_t number, const Access& access) {
    for_each_block(access, [&](BlockState& state, std::uint32_t bytes) {
      if (!access.is_write) {
        state.read[pipe] = number;
        state.read_bytes |= bytes;
      } else if (bytes == kAllBytes || state.writer != pipe) {
        state = BlockState{pipe, number, {}, bytes, 0};
      } else {
        // adjacent blocks written by the same pipe are treated as written now, which is never too early
        state.written = number;
        state.written_bytes |= bytes;
        state.read_bytes &= ~bytes;
      }
    });
    if (access.is_write && owns(access.pointer))
      std::memset(written_.data() + (static_cast<const std::uint8_t*>(access.pointer) - buffer_.bytes), 1,
                  access.bytes);
  }

  template <class Visit>
  void for_each_block(const Access& access, Visit visit) {
    if (access.bytes == 0) return;
    if (owns(access.pointer)) {
      const std::size_t first = static_cast<const std::uint8_t*>(access.pointer) - buffer_.bytes;
      for (auto block = first / kBlockBytes; block <= (first + access.bytes - 1) / kBlockBytes; ++block)
        visit(local_blocks_[block], kAllBytes);
      return;
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(access.pointer), end = begin + access.bytes;
    for (auto block = begin / kBlockBytes; block <= (end - 1) / kBlockBytes; ++block) {
      const auto first = std::max(begin, block * kBlockBytes) % kBlockBytes;
      const auto count = std::min(end, (block + 1) * kBlockBytes) - block * kBlockBytes - first;
      visit(global_blocks_[block], static_cast<std::uint32_t>(((std::uint64_t{1} << count) - 1) << first));
    }
  }

  const int index_, count_;
  GlobalMemory& memory_;
  struct alignas(kBlockBytes) Buffer {
    std::uint8_t bytes[kUnifiedBufferBytes];
  } buffer_;
  std::vector<std::uint8_t> written_;
  std::size_t used_ = 0;
  Clock issued_{};
  std::array<Clock, kNumPipes> known_{};
  std::vector<BlockState> local_blocks_;
  std::unordered_map<std::uintptr_t, BlockState> global_blocks_;
  std::map<std::array<int, 3>, Clock> flags_;
};

// The core that the calling thread simulates; null outside of a launch.
inline thread_local Core* current_core = nullptr;

inline Core& core() {
  if (current_core == nullptr) violate("Ascend C", "called outside of a kernel's launch");
  return *current_core;
}

}  // namespace ascend_sim::ascendc

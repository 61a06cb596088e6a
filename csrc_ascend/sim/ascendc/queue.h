// Queues and buffers in the unified buffer: TPipe, TQue, TBuf, event flags and barriers.
//
// A queue hands a buffer from the pipe that fills it to the pipe that uses it, and back. For VECIN, MTE2 fills
// and V uses; for VECOUT, V fills and MTE3 uses; for VECCALC both are V. EnQue and DeQue order the use behind
// the filling, FreeTensor and AllocTensor the next filling behind the use.
#pragma once

#include <deque>
#include <vector>

#include "tensor.h"

namespace AscendC {

using ascend_sim::ascendc::Clock;

class TPipe;

enum class TPosition { GM, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;

enum class HardEvent {
  S_V,
  S_MTE2,
  S_MTE3,
  V_S,
  V_V,
  V_MTE2,
  V_MTE3,
  MTE2_S,
  MTE2_V,
  MTE2_MTE3,
  MTE3_S,
  MTE3_V,
  MTE3_MTE2
};

constexpr int EVENT_ID0 = 0;

namespace detail {

struct PipePair {
  pipe_t from, to;
};

constexpr PipePair pipes_of(HardEvent event) {
  switch (event) {
    case HardEvent::S_V:
      return {PIPE_S, PIPE_V};
    case HardEvent::S_MTE2:
      return {PIPE_S, PIPE_MTE2};
    case HardEvent::S_MTE3:
      return {PIPE_S, PIPE_MTE3};
    case HardEvent::V_S:
      return {PIPE_V, PIPE_S};
    case HardEvent::V_V:
      return {PIPE_V, PIPE_V};
    case HardEvent::V_MTE2:
      return {PIPE_V, PIPE_MTE2};
    case HardEvent::V_MTE3:
      return {PIPE_V, PIPE_MTE3};
    case HardEvent::MTE2_S:
      return {PIPE_MTE2, PIPE_S};
    case HardEvent::MTE2_V:
      return {PIPE_MTE2, PIPE_V};
    case HardEvent::MTE2_MTE3:
      return {PIPE_MTE2, PIPE_MTE3};
    case HardEvent::MTE3_S:
      return {PIPE_MTE3, PIPE_S};
    case HardEvent::MTE3_V:
      return {PIPE_MTE3, PIPE_V};
    case HardEvent::MTE3_MTE2:
      return {PIPE_MTE3, PIPE_MTE2};
  }
  return {PIPE_S, PIPE_S};
}

constexpr pipe_t filler_of(TPosition position) { return position == TPosition::VECIN ? PIPE_MTE2 : PIPE_V; }
constexpr pipe_t user_of(TPosition position) { return position == TPosition::VECOUT ? PIPE_MTE3 : PIPE_V; }

template <class T>
LocalTensor<T> tensor_at(std::size_t offset, std::size_t bytes) {
  return {reinterpret_cast<T*>(core().buffer() + offset), static_cast<std::uint32_t>(bytes / sizeof(T))};
}

}  // namespace detail

template <HardEvent event>
void SetFlag(int id) {
  constexpr auto pipes = detail::pipes_of(event);
  core().set_flag(pipes.from, pipes.to, id);
}

template <HardEvent event>
void WaitFlag(int id) {
  constexpr auto pipes = detail::pipes_of(event);
  core().wait_flag(pipes.from, pipes.to, id);
}

template <pipe_t pipe>
void PipeBarrier() {
  core().barrier(pipe);
}

namespace detail {

// Base of all queues; `filler` and `user` are the pipes before and behind it.
class Queue {
 public:
  template <class T>
  LocalTensor<T> AllocTensor() {
    require(bytes_ > 0, "TQue.AllocTensor", "the queue has no buffers: TPipe.InitBuffer comes first");
    for (Buffer& buffer : buffers_) {
      if (buffer.state != State::kFree) continue;
      core().wait(filler_, buffer.clock);
      buffer.state = State::kAllocated;
      return tensor_at<T>(buffer.offset, bytes_);
    }
    violate("TQue.AllocTensor",
            "all " + std::to_string(buffers_.size()) + " buffers are in use: the core hangs");
  }

  template <class T>
  bool EnQue(const LocalTensor<T>& tensor) {
    Buffer& buffer = find(tensor.data(), State::kAllocated, "TQue.EnQue");
    require(waiting_.size() < depth_, "TQue.EnQue", "more than the queue's depth");
    buffer.clock = core().snapshot(filler_);
    buffer.state = State::kQueued;
    waiting_.push_back(&buffer);
    return true;
  }

  template <class T>
  LocalTensor<T> DeQue() {
    require(!waiting_.empty(), "TQue.DeQue", "nothing was queued: the core hangs");
    Buffer& buffer = *waiting_.front();
    waiting_.pop_front();
    buffer.state = State::kTaken;
    core().wait(user_, buffer.clock);
    return tensor_at<T>(buffer.offset, bytes_);
  }

  template <class T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    Buffer& buffer = find(tensor.data(), State::kTaken, "TQue.FreeTensor");
    buffer.clock = core().snapshot(user_);
    buffer.state = State::kFree;
  }

 protected:
  Queue(pipe_t filler, pipe_t user, std::size_t depth) : filler_(filler), user_(user), depth_(depth) {}

 private:
  friend class AscendC::TPipe;
  enum class State { kFree, kAllocated, kQueued, kTaken };
  struct Buffer {
    std::size_t offset;
    State state = State::kFree;
    Clock clock{};  // what its next owner waits for
  };

  Buffer& find(const void* data, State state, const char* call) {
    for (Buffer& buffer : buffers_)
      if (core().buffer() + buffer.offset == data && buffer.state == state) return buffer;
    static constexpr const char* names[] = {"free", "allocated", "queued", "dequeued"};
    violate(call, std::string("the tensor is not one that this queue has ") + names[static_cast<int>(state)]);
  }

  const pipe_t filler_, user_;
  const std::size_t depth_;
  std::vector<Buffer> buffers_;
  std::deque<Buffer*> waiting_;
  std::size_t bytes_ = 0;
};

}  // namespace detail

// A queue of `depth` buffers at most.
template <TPosition position, int depth>
class TQue : public detail::Queue {
  static_assert(position == TPosition::VECIN || position == TPosition::VECOUT || position == TPosition::VECCALC,
                "a vector core has queues VECIN, VECOUT and VECCALC");

 public:
  TQue() : Queue(detail::filler_of(position), detail::user_of(position), depth) {}
};

// A queue directly from the copy in to the copy out.
template <TPosition from, TPosition to, int depth>
class TQueBind : public detail::Queue {
  static_assert(from == TPosition::VECIN && to == TPosition::VECOUT, "this shim binds VECIN to VECOUT only");

 public:
  TQueBind() : Queue(detail::filler_of(from), detail::user_of(to), depth) {}
};

// A buffer without a queue; sharing it between pipes needs flags.
template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() const {
    require(bytes_ > 0, "TBuf.Get", "the buffer has no memory: TPipe.InitBuffer comes first");
    return detail::tensor_at<T>(offset_, bytes_);
  }

  template <class T>
  LocalTensor<T> Get(std::uint32_t size) const {
    require(size * sizeof(T) <= bytes_, "TBuf.Get", "more than the buffer holds");
    return detail::tensor_at<T>(offset_, size * sizeof(T));
  }

 private:
  friend class TPipe;
  std::size_t offset_ = 0, bytes_ = 0;
};

// Allocates the unified buffer and event ids.
class TPipe {
 public:
  bool InitBuffer(detail::Queue& queue, int count, std::uint32_t bytes) {
    require(queue.buffers_.empty(), "TPipe.InitBuffer", "the queue has buffers already");
    require(count > 0, "TPipe.InitBuffer", "a queue has one buffer at least");
    queue.bytes_ = round_up(bytes);
    for (int number = 0; number < count; ++number)
      queue.buffers_.push_back({core().allocate(queue.bytes_, "TPipe.InitBuffer")});
    return true;
  }

  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, std::uint32_t bytes) {
    require(buffer.bytes_ == 0, "TPipe.InitBuffer", "the buffer has memory already");
    buffer.bytes_ = round_up(bytes);
    buffer.offset_ = core().allocate(buffer.bytes_, "TPipe.InitBuffer");
    return true;
  }

  // An id that is used right away and waited for before the next one of the same kind is fetched.
  int FetchEventID(HardEvent) { return 0; }

 private:
  static std::size_t round_up(std::uint32_t bytes) {
    constexpr auto unit = ascend_sim::ascendc::kBlockBytes;
    return (bytes + unit - 1) / unit * unit;
  }
};

inline int GetBlockIdx() { return core().index(); }
inline int GetBlockNum() { return core().count(); }

}  // namespace AscendC

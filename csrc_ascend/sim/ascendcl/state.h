// State shared by the parts of libascendcl: handles, devices, streams, events and the graphs they are captured
// into.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "sim/runtime.h"

// The headers of the runtime mark some functions deprecated; they are defined here all the same.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace ascend_sim {

// One lock guards every table and queue below. It is never held while work runs.
extern std::mutex g_mutex;
using Lock = std::unique_lock<std::mutex>;

struct Options {
  int devices;
  std::size_t memory;
  std::string soc_name;
  double sync_timeout_s;
};
const Options& options();

// Live handles of one kind. A handle that is not in it was never made, or is destroyed.
template <class T>
class Registry {
 public:
  Registry(const char* what, aclError error) : what_(what), error_(error) {}

  T* add(std::unique_ptr<T> object) {
    T* handle = object.get();
    live_.emplace(handle, std::move(object));
    return handle;
  }
  T* get(const void* handle) const {
    auto found = live_.find(handle);
    if (found == live_.end()) throw RuntimeError(error_, std::string("not a live ") + what_);
    return found->second.get();
  }
  bool has(const void* handle) const { return live_.count(handle) != 0; }
  std::unique_ptr<T> remove(const void* handle) {
    get(handle);
    auto node = live_.extract(handle);
    return std::move(node.mapped());
  }
  template <class F>
  void each(F&& visit) const {
    for (const auto& item : live_) visit(item.second.get());
  }

 private:
  const char* what_;
  aclError error_;
  std::map<const void*, std::unique_ptr<T>> live_;
};

struct Stream;
struct Event;
struct Capture;

// An entry of a stream's queue: runs, or returns false if it must wait, and is then called again.
struct Task {
  std::string name;
  std::function<bool()> run;
  bool done = false;
  std::exception_ptr error;
};

struct Node {
  std::string name;
  std::function<void()> work;
  // the replay waits here until this returns true; called under the lock
  std::function<bool()> ready = {};
  // the external event that it waits for, if it is one's
  const Event* wait = nullptr;
};

struct TaskGroup {
  struct Graph* graph;
  std::size_t begin;
  std::size_t end;
};

struct Graph {
  std::uint32_t id;
  std::vector<Node> nodes;
  std::vector<std::unique_ptr<TaskGroup>> groups;
  int replays_under_way = 0;
};

// Length of each stream's recorded work that is ordered before a point of the capture.
using Seen = std::map<const Stream*, std::size_t>;

struct Capture {
  Stream* origin;
  aclmdlRICaptureMode mode;
  std::thread::id thread;
  bool invalidated = false;
  std::unique_ptr<Graph> graph;
  std::map<Stream*, Seen> streams;
};

struct Update {
  TaskGroup* group;
  std::size_t position;
};

struct Stream {
  std::int32_t id;
  int device;
  std::uint32_t flags;
  std::deque<std::shared_ptr<Task>> queue;
  bool running = false;
  std::string failure;  // of work that ran after its submission had returned
  std::shared_ptr<Capture> capture;
  std::optional<std::size_t> group_begin;
  std::optional<Update> update;
};

struct Event {
  std::uint32_t flags;
  // records asked for, and the newest that has happened; a wait is for the record that was newest when it was
  // made
  std::uint64_t issued = 0;
  std::uint64_t reached = 0;
  std::chrono::steady_clock::time_point when{};
  // the last record was inside this capture
  std::weak_ptr<Capture> capture;
  bool captured = false;
  Seen seen;
};

struct Context {
  int device;
};

extern Registry<Stream> g_streams;
extern Registry<Event> g_events;
extern Registry<Graph> g_graphs;

// The stream of a handle; null is the current device's default stream. Under the lock.
Stream* stream_of(aclrtStream handle);
bool is_default_stream(const Stream* stream);

// Runs the tasks of a stream's queue that need not wait. Without the lock.
void pump(Stream* stream);
// Wakes streams that wait for an event. Without the lock.
void pump_waiting();
// Puts a task at a stream's end and runs what can run; throws what the task threw if it ran. Without the lock.
void enqueue(Stream* stream, std::string name, std::function<bool()> run);
// Waits until the streams' queues are empty; RuntimeError if that takes longer than the timeout allows.
void drain(const std::vector<Stream*>& streams, double timeout_s);
// A record of an event that is executed now. Under the lock.
void reach(Event* event, std::uint64_t number);

// Adds a node to the graph that captures the stream. Under the lock.
void append_node(Stream* stream, Node node);
// Rejects a call that is not allowed while a graph is captured, and invalidates the captures. Without the lock.
void refuse_while_capturing(const char* call);
// The same for this stream only. Under the lock.
void refuse_if_captured(Stream* stream, const char* call);

// The calling thread's device; RuntimeError without one. Without the lock.
int require_device();
void check_device(int device);

}  // namespace ascend_sim

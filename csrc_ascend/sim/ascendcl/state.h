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
  std::string cann;
  double sync_timeout_s;
  // failures of work show at the next synchronisation, and at all that follow
  bool late_errors;
  // operator and the number of the launch that fails, such as "aclnnMm:3"; empty: none
  std::string fails;
  // that a device has, those that graphs keep among them
  std::size_t streams;
  std::size_t events;
  std::size_t notifies;
  // file of the account of memory that processes share; empty: each has its devices alone
  std::string cards;
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
  std::size_t size() const { return live_.size(); }
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
  bool in_group = false;
  // an update of its task group that no replay has used yet
  bool updated = false;
};

struct TaskGroup {
  struct Graph* graph;
  std::size_t begin;
  std::size_t end;
};

struct Replay;

struct Graph {
  std::uint32_t id;
  std::vector<Node> nodes;
  std::vector<std::unique_ptr<TaskGroup>> groups;
  // asked for and not finished
  std::set<const Replay*> replays;
  // those that it was captured on, and a notify for each wait between them, which it keeps
  std::size_t num_streams = 0;
  std::size_t num_waits = 0;
  std::unique_ptr<Notifies> notifies;
};

// A replay in a stream; continues where it stopped at an external event that was not recorded yet.
struct Replay {
  Graph* graph;
  std::size_t next = 0;
  // since the last task group it has waited for an event, which tells that the next one is updated
  bool gated = false;

  // Runs what need not wait; returns whether the replay has ended.
  bool run();
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

// Refuses another stream beyond the device's. Under the lock.
void require_stream_left(int device);
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
// An update of a node reaches its graph; RuntimeError if a replay under way needs what it replaces, or is past
// it. Under the lock.
void replace_work(Graph* graph, std::size_t position, std::function<void()> work);
// Rejects a call that is not allowed while a graph is captured, and invalidates the captures. Without the lock.
void refuse_while_capturing(const char* call);
// The same for this stream only. Under the lock.
void refuse_if_captured(Stream* stream, const char* call);

// The calling thread's device; RuntimeError without one. Without the lock.
int require_device();
void check_device(int device);
// The machine's number of a device, as ASCEND_RT_VISIBLE_DEVICES lists it.
int card_of(int device);

}  // namespace ascend_sim

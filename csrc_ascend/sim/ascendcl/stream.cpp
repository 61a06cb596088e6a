// Streams as queues. Work runs when it is submitted, unless earlier work of its stream waits for an event: then
// it is queued and runs when the event is recorded.
#include <algorithm>

#include "state.h"

namespace ascend_sim {

Registry<Stream> g_streams("stream", ACL_ERROR_RT_STREAM_CONTEXT);

namespace {

std::map<int, Stream*> g_default_streams;
std::int32_t g_next_stream_id = 0;
// notified when a queue gets shorter or an event is recorded
std::condition_variable g_progress;
// how often waiting streams were woken
std::uint64_t g_signals = 0;
// nesting depth of tasks in this thread: work that submits work must not wait for it
thread_local int t_depth = 0;

}  // namespace

void require_stream_left(int device) {
  std::size_t used = 0;
  g_streams.each([&](const Stream* stream) { used += stream->device == device; });
  g_graphs.each([&](const Graph* graph) { used += graph->num_streams; });
  if (used >= options().streams)
    throw RuntimeError(ACL_ERROR_RT_NO_STREAM_RESOURCE, "the device's " + std::to_string(options().streams) +
                                                            " streams are in use, by graphs too");
}

namespace {

Stream* make_stream(int device, std::uint32_t flags) {
  require_stream_left(device);
  auto stream = std::make_unique<Stream>();
  stream->id = g_next_stream_id++;
  stream->device = device;
  stream->flags = flags;
  return g_streams.add(std::move(stream));
}

void run_one(Lock& lock, Stream* stream, bool& waits) {
  std::shared_ptr<Task> task = stream->queue.front();
  lock.unlock();
  bool finished = true;
  ++t_depth;
  try {
    finished = task->run();
  } catch (...) {
    task->error = std::current_exception();
  }
  --t_depth;
  lock.lock();
  waits = !finished;
  if (finished) {
    stream->queue.pop_front();
    task->done = true;
  }
  g_progress.notify_all();
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  }
}

}  // namespace

Stream* stream_of(aclrtStream handle) {
  if (handle != nullptr) return g_streams.get(handle);
  int device = require_device();
  auto found = g_default_streams.find(device);
  if (found != g_default_streams.end()) return found->second;
  return g_default_streams[device] = make_stream(device, 0);
}

bool is_default_stream(const Stream* stream) {
  auto found = g_default_streams.find(stream->device);
  return found != g_default_streams.end() && found->second == stream;
}

void pump(Stream* stream) {
  Lock lock(g_mutex);
  if (!g_streams.has(stream)) return;  // destroyed since it was found waiting
  if (stream->running) return;         // the thread that runs it checks the queue again
  stream->running = true;
  while (!stream->queue.empty()) {
    const std::uint64_t signals = g_signals;
    bool waits = false;
    run_one(lock, stream, waits);
    // what it waits for may have come after it was looked for, while nobody else could run the stream
    if (waits && signals == g_signals) break;
  }
  stream->running = false;
  g_progress.notify_all();
}

void pump_waiting() {
  std::vector<Stream*> waiting;
  {
    Lock lock(g_mutex);
    ++g_signals;
    g_streams.each([&](Stream* stream) {
      if (!stream->queue.empty() && !stream->running) waiting.push_back(stream);
    });
    g_progress.notify_all();
  }
  std::sort(waiting.begin(), waiting.end(), [](const Stream* a, const Stream* b) { return a->id < b->id; });
  for (Stream* stream : waiting) pump(stream);
}

void enqueue(Stream* stream, std::string name, std::function<bool()> run) {
  auto task = std::make_shared<Task>(Task{std::move(name), std::move(run), false, nullptr});
  {
    Lock lock(g_mutex);
    stream->queue.push_back(task);
  }
  pump(stream);
  Lock lock(g_mutex);
  if (t_depth == 0) {
    // another thread may be running the stream: its work and then this is done before the call returns
    g_progress.wait(lock, [&] { return task->done || !stream->running; });
  }
  if (task->done && task->error) {
    if (!options().late_errors) std::rethrow_exception(task->error);
    if (stream->failure.empty()) stream->failure = task->name + ": " + text_of(task->error);
  }
  if (!task->done) {
    // it runs later, and the stream's next synchronisation reports its failure, as on the device
    task->run = [stream, inner = std::move(task->run), name = task->name] {
      try {
        return inner();
      } catch (...) {
        Lock late(g_mutex);
        stream->failure = name + ": " + text_of(std::current_exception());
        return true;
      }
    };
  }
}

namespace {

// Under the lock.
std::string where(const Stream* stream) {
  return stream->queue.empty() ? "work that does not end" : stream->queue.front()->name;
}

// The other streams that wait, which may be what a stream waits for. Under the lock.
std::string others_than(const Stream* one) {
  std::string text;
  g_streams.each([&](const Stream* stream) {
    if (stream != one && !stream->queue.empty())
      text += "; stream " + std::to_string(stream->id) + " waits in " + where(stream);
  });
  return text;
}

}  // namespace

void drain(const std::vector<Stream*>& streams, double timeout_s) {
  for (Stream* stream : streams) {
    pump(stream);
    Lock lock(g_mutex);
    auto empty = [&] { return stream->queue.empty() && !stream->running; };
    if (!g_progress.wait_for(lock, std::chrono::duration<double>(timeout_s), empty)) {
      throw RuntimeError(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                         "stream " + std::to_string(stream->id) + " did not get past " + where(stream) +
                             ": the event it waits for was never recorded" + others_than(stream));
    }
    if (!stream->failure.empty())
      // a device that failed late has failed for good
      throw RuntimeError(ACL_ERROR_RT_AICORE_EXCEPTION,
                         options().late_errors ? stream->failure : std::exchange(stream->failure, {}));
  }
}

}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

namespace {

aclError synchronize_stream(const char* call, aclrtStream handle, double timeout_s) {
  return reporting(call, [&] {
    Stream* stream = nullptr;
    {
      Lock lock(g_mutex);
      stream = stream_of(handle);
      refuse_if_captured(stream, call);
    }
    drain({stream}, timeout_s);
  });
}

aclError synchronize_device(const char* call, double timeout_s) {
  return reporting(call, [&] {
    int device = require_device();
    refuse_while_capturing(call);
    std::vector<Stream*> streams;
    {
      Lock lock(g_mutex);
      g_streams.each([&](Stream* stream) {
        if (stream->device == device) streams.push_back(stream);
      });
    }
    drain(streams, timeout_s);
  });
}

double seconds(int32_t milliseconds) {
  return milliseconds < 0 ? options().sync_timeout_s : milliseconds / 1000.0;
}

aclError destroy_stream(const char* call, aclrtStream handle, bool even_with_work) {
  return reporting(call, [&] {
    if (handle == nullptr)
      throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "the default stream cannot be destroyed");
    Lock lock(g_mutex);
    Stream* stream = g_streams.get(handle);
    if (stream->capture) throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured");
    if (stream->update)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is being updated on it");
    if (!stream->queue.empty() && !even_with_work)
      throw RuntimeError(ACL_ERROR_RT_STREAM_NOT_COMPLETE, "it still waits in " + stream->queue.front()->name);
    g_streams.remove(handle);
  });
}

}  // namespace

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t flag) {
  return reporting("aclrtCreateStream", [&] {
    int device = require_device();
    Lock lock(g_mutex);
    *stream = make_stream(device, flag);
  });
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) { return destroy_stream("aclrtDestroyStream", stream, false); }
aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return destroy_stream("aclrtDestroyStreamForce", stream, true);
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return synchronize_stream("aclrtSynchronizeStream", stream, options().sync_timeout_s);
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  return synchronize_stream("aclrtSynchronizeStreamWithTimeout", stream, seconds(timeout));
}
aclError aclrtSynchronizeDevice() {
  return synchronize_device("aclrtSynchronizeDevice", options().sync_timeout_s);
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  return synchronize_device("aclrtSynchronizeDeviceWithTimeout", seconds(timeout));
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  return reporting("aclrtStreamQuery", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    refuse_if_captured(stream, "aclrtStreamQuery");
    *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  });
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  return reporting("aclrtStreamGetId", [&] {
    Lock lock(g_mutex);
    *id = stream_of(handle)->id;
  });
}

// Settings without effect here, but the handle is checked.
static aclError known_stream(const char* call, aclrtStream handle) {
  return reporting(call, [&] {
    Lock lock(g_mutex);
    stream_of(handle);
  });
}
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t) {
  return known_stream("aclrtSetStreamFailureMode", stream);
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t) {
  return known_stream("aclrtSetStreamOverflowSwitch", stream);
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
  *flag = 0;
  return known_stream("aclrtGetStreamOverflowSwitch", stream);
}
aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr, aclrtStreamAttrValue*) {
  return known_stream("aclrtSetStreamAttribute", stream);
}

// Host callbacks, in order with the stream's work. torch_npu's thread that processes reports has nothing to do,
// since callbacks run in the thread that runs the work.
aclError aclrtSubscribeReport(uint64_t, aclrtStream stream) {
  return known_stream("aclrtSubscribeReport", stream);
}
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream stream) {
  return known_stream("aclrtUnSubscribeReport", stream);
}
aclError aclrtProcessReport(int32_t timeout) {
  // as if nothing was reported in that time
  std::this_thread::sleep_for(std::chrono::milliseconds(timeout < 0 ? 100 : timeout));
  return ACL_SUCCESS;
}
aclError aclrtLaunchCallback(aclrtCallback callback, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  return reporting("aclrtLaunchCallback", [&] {
    if (callback == nullptr) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "there is no function");
    submit(stream, "aclrtLaunchCallback", [=] { callback(data); });
  });
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc callback, void* data) {
  return reporting("aclrtLaunchHostFunc", [&] {
    if (callback == nullptr) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "there is no function");
    submit(stream, "aclrtLaunchHostFunc", [=] { callback(data); });
  });
}
}

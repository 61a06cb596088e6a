// Graphs: the work submitted to a stream during capture, in the order of the calls, which replays run again.
//
// Which calls break a capture follows the three modes that CANN documents for
// aclmdlRICaptureThreadExchangeMode: in the global mode no thread may make a copy or a fill that waits, in the
// thread-local one only the capturing thread may not, in the relaxed one all may. Memory may be allocated and
// freed in each of them.
#include <fstream>
#include <iostream>

#include "state.h"

namespace ascend_sim {

Registry<Graph> g_graphs("graph", ACL_ERROR_RT_MODEL_CONTEXT);

namespace {

std::set<Capture*> g_captures;
std::uint32_t g_next_graph_id = 1;
thread_local aclmdlRICaptureMode t_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

Capture& active_capture(Stream* stream) {
  if (!stream->capture)
    throw RuntimeError(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
  if (stream->capture->invalidated)
    throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                       "a call that is not allowed has broken the capture");
  return *stream->capture;
}

// Every stream that joined the capture must have been joined back: its last work is ordered before the origin's
// end.
void check_joined(const Capture& capture) {
  const Seen& seen = capture.streams.at(capture.origin);
  for (const auto& [stream, own] : capture.streams) {
    if (stream == capture.origin) continue;
    auto count = seen.find(stream);
    if (count == seen.end() || count->second < own.at(stream))
      throw RuntimeError(
          ACL_ERROR_RT_STREAM_UNJOINED,
          "stream " + std::to_string(stream->id) + " joined the capture and its work is not waited for");
  }
}

void release(const std::shared_ptr<Capture>& capture) {
  for (const auto& item : capture->streams) {
    item.first->capture.reset();
    item.first->group_begin.reset();
  }
  g_captures.erase(capture.get());
}

}  // namespace

bool Replay::run() {
  while (true) {
    std::function<void()> work;
    {
      Lock lock(g_mutex);
      if (next == graph->nodes.size()) {
        graph->replays.erase(this);
        return true;
      }
      Node& node = graph->nodes[next];
      if (node.ready && !node.ready()) return false;
      if (node.in_group && gated && !node.updated) {
        graph->replays.erase(this);
        throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                           node.name +
                               " would run with the arguments of an earlier replay: the event that the "
                               "replay waits for is recorded before the update");
      }
      if (!node.in_group) {
        const bool follows_group = next > 0 && graph->nodes[next - 1].in_group;
        gated = node.ready || (gated && !follows_group);
      }
      work = node.work;  // by value: an update may replace the node while others run
      node.updated = false;
      ++next;
    }
    try {
      work();
    } catch (...) {
      Lock lock(g_mutex);
      graph->replays.erase(this);
      throw;
    }
  }
}

void replace_work(Graph* graph, std::size_t position, std::function<void()> work) {
  if (!g_graphs.has(graph)) return;
  Node& node = graph->nodes.at(position);
  for (const Replay* replay : graph->replays) {
    if (replay->next > position)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                         node.name +
                             " is updated after the replay under way has run it: record the event that "
                             "the replay waits for behind the update");
    if (node.updated)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                         node.name +
                             " is updated again before the replay under way has run it: let the stream of "
                             "updates wait for the replay's end");
  }
  node.work = std::move(work);
  node.updated = true;
}

void append_node(Stream* stream, Node node) {
  Capture& capture = active_capture(stream);
  // a group accepts operator calls only: copies, events and callbacks cannot be updated
  if (stream->group_begin && node.name.rfind("aclrt", 0) == 0)
    throw RuntimeError(ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT, node.name + " cannot be part of a task group");
  capture.graph->nodes.push_back(std::move(node));
  ++capture.streams.at(stream)[stream];
}

void refuse_if_captured(Stream* stream, const char* call) {
  if (!stream->capture) return;
  stream->capture->invalidated = true;
  throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURED, std::string(call) + " on a stream that is being captured");
}

void refuse_while_capturing(const char* call) {
  if (t_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return;
  Lock lock(g_mutex);
  bool refused = false;
  for (Capture* capture : g_captures) {
    bool mine =
        capture->thread == std::this_thread::get_id() && capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
    bool anyones =
        t_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    if (mine || anyones) capture->invalidated = refused = true;
  }
  if (refused)
    throw RuntimeError(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                       std::string(call) + " is not allowed while a graph is being captured");
}

}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  return reporting("aclmdlRICaptureBegin", [&] {
    require_device();
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    if (is_default_stream(stream))
      throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
    if (stream->capture)
      throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured already");
    if (stream->update)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is being updated on it");
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->graph = std::make_unique<Graph>();
    capture->graph->id = g_next_graph_id++;
    capture->streams[stream][stream] = 0;
    g_captures.insert(capture.get());
    stream->capture = std::move(capture);
  });
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  return reporting("aclmdlRICaptureGetInfo", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    if (!stream->capture) {
      *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
      return;
    }
    *status = stream->capture->invalidated ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                           : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    if (graph != nullptr) *graph = stream->capture->graph.get();
  });
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* graph) {
  return reporting("aclmdlRICaptureEnd", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    if (!stream->capture)
      throw RuntimeError(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
    std::shared_ptr<Capture> capture = stream->capture;
    if (capture->origin != stream)
      throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture was begun on another stream");
    if (capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
      throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "the capture was begun by another thread");
    // the capture ends even if it fails
    release(capture);
    *graph = nullptr;
    if (capture->invalidated)
      throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                         "a call that is not allowed has broken the capture");
    check_joined(*capture);
    for (const auto& item : capture->streams) {
      require_stream_left(item.first->device);
      ++capture->graph->num_streams;
    }
    capture->graph->notifies = std::make_unique<Notifies>(capture->origin->device, capture->graph->num_waits);
    *graph = g_graphs.add(std::move(capture->graph));
  });
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, t_mode);
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
  return reporting("aclmdlRIExecuteAsync", [&] {
    Stream* stream = nullptr;
    auto replay = std::make_shared<Replay>();
    {
      Lock lock(g_mutex);
      stream = stream_of(stream_handle);
      replay->graph = g_graphs.get(handle);
      if (stream->capture)
        throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURED,
                           "a graph cannot be replayed on a stream being captured");
      if (stream->update)
        throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is being updated on the stream");
      replay->graph->replays.insert(replay.get());
    }
    enqueue(stream, "aclmdlRIExecuteAsync", [replay] { return replay->run(); });
  });
}

aclError aclmdlRIExecute(aclmdlRI graph, int32_t timeout) {
  aclError error = aclmdlRIExecuteAsync(graph, nullptr);
  return error != ACL_SUCCESS ? error : aclrtSynchronizeStreamWithTimeout(nullptr, timeout);
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
  return reporting("aclmdlRIDestroy", [&] {
    Lock lock(g_mutex);
    Graph* graph = g_graphs.get(handle);
    if (!graph->replays.empty())
      throw RuntimeError(ACL_ERROR_RT_MODEL_RUNNING, "a replay of the graph still waits for an event");
    g_graphs.remove(handle);
  });
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  return reporting("aclmdlRIGetId", [&] {
    Lock lock(g_mutex);
    // torch_npu asks while the graph is captured, too
    for (Capture* capture : g_captures)
      if (capture->graph.get() == handle) {
        *id = capture->graph->id;
        return;
      }
    *id = g_graphs.get(handle)->id;
  });
}

aclError aclmdlRIDebugPrint(aclmdlRI handle) {
  return reporting("aclmdlRIDebugPrint", [&] {
    Lock lock(g_mutex);
    for (const Node& node : g_graphs.get(handle)->nodes) std::cerr << "[ascend-sim] node " << node.name << "\n";
  });
}

aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
  return reporting("aclmdlRIDebugJsonPrint", [&] {
    Lock lock(g_mutex);
    const Graph* graph = g_graphs.get(handle);
    std::ofstream file(path);
    if (!file) throw RuntimeError(ACL_ERROR_RT_FILE_OPEN, std::string("cannot write ") + path);
    file << "{\"id\": " << graph->id << ", \"nodes\": [";
    for (std::size_t i = 0; i < graph->nodes.size(); ++i)
      file << (i == 0 ? "" : ", ") << '"' << graph->nodes[i].name << '"';
    file << "]}\n";
  });
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  return reporting("aclmdlRICaptureTaskGrpBegin", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    Capture& capture = active_capture(stream);
    if (stream->group_begin)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is open on this stream already");
    stream->group_begin = capture.graph->nodes.size();
  });
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  return reporting("aclmdlRICaptureTaskGrpEnd", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    Capture& capture = active_capture(stream);
    if (!stream->group_begin)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open on this stream");
    auto made = std::make_unique<TaskGroup>();
    made->graph = capture.graph.get();
    made->begin = *std::exchange(stream->group_begin, std::nullopt);
    made->end = capture.graph->nodes.size();
    for (std::size_t at = made->begin; at < made->end; ++at) capture.graph->nodes[at].in_group = true;
    if (made->begin == made->end)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the task group has no work in it");
    *group = made.get();
    capture.graph->groups.push_back(std::move(made));
  });
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  return reporting("aclmdlRICaptureTaskUpdateBegin", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    if (stream->capture)
      throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURED,
                         "a task group is updated on a stream that is not captured");
    if (stream->update)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update is open on this stream");
    TaskGroup* found = nullptr;
    g_graphs.each([&](const Graph* graph) {
      for (const auto& one : graph->groups)
        if (one.get() == group) found = one.get();
    });
    if (found == nullptr)
      throw RuntimeError(ACL_ERROR_RT_INVALID_HANDLE,
                         "not a task group of a live graph whose capture has ended");
    stream->update = Update{found, 0};
  });
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  return reporting("aclmdlRICaptureTaskUpdateEnd", [&] {
    Lock lock(g_mutex);
    Stream* stream = stream_of(handle);
    if (!stream->update)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update is open on this stream");
    Update update = *std::exchange(stream->update, std::nullopt);
    std::size_t size = update.group->end - update.group->begin;
    if (update.position != size)
      throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                         "the update of a task group brought " + std::to_string(update.position) +
                             " pieces of work where the group has " + std::to_string(size));
  });
}
}

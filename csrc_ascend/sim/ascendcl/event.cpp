// Events: records and waits are tasks of their streams. An external event (ACL_EVENT_EXTERNAL) may be part of a
// graph: its wait blocks a replay until the event is recorded from outside.
#include "state.h"

namespace ascend_sim {

Registry<Event> g_events("event", ACL_ERROR_RT_INVALID_HANDLE);

namespace {

std::mutex g_notify_mutex;
std::map<int, std::size_t> g_notifies;  // taken of each device

}  // namespace

Notifies::Notifies(int device, std::size_t count) : device_(device), count_(count) {
  const std::lock_guard<std::mutex> guard(g_notify_mutex);
  if (count > options().notifies - g_notifies[device])
    throw RuntimeError(ACL_ERROR_RT_NO_NOTIFY_RESOURCE,
                       std::to_string(count) + " notifies are needed, and " +
                           std::to_string(g_notifies[device]) + " of the device's " +
                           std::to_string(options().notifies) + " are in use, by graphs and communicators");
  g_notifies[device] += count;
}

Notifies::~Notifies() {
  const std::lock_guard<std::mutex> guard(g_notify_mutex);
  g_notifies[device_] -= count_;
}

void reach(Event* event, std::uint64_t number) {
  event->reached = std::max(event->reached, number);
  event->when = std::chrono::steady_clock::now();
}

namespace {

bool is_external(const Event* event) { return (event->flags & ACL_EVENT_EXTERNAL) != 0; }

// Makes an event for the host of what was recorded inside a capture: that has no time and no end.
void refuse_captured_event(const Event* event) {
  if (event->captured)
    throw RuntimeError(ACL_ERROR_RT_EVENT_CAPTURED,
                       "the event was recorded while a graph was captured; only that graph can wait for it");
}

void record_in_capture(Stream* stream, Event* event) {
  if (is_external(event)) {
    append_node(stream, {"aclrtRecordEvent", [event] {
                           {
                             Lock lock(g_mutex);
                             reach(event, ++event->issued);
                           }
                           pump_waiting();
                         }});
    return;
  }
  append_node(stream, {"aclrtRecordEvent", [] {}});
  event->captured = true;
  event->capture = stream->capture;
  event->seen = stream->capture->streams.at(stream);
}

void wait_in_capture(Stream* stream, Event* event) {
  if (is_external(event)) {
    auto ready = [event] { return event->issued != 0 && event->reached >= event->issued; };
    append_node(stream, {"aclrtStreamWaitEvent", [] {}, ready, event});
    return;
  }
  std::shared_ptr<Capture> capture = event->capture.lock();
  if (!event->captured || !capture)
    throw RuntimeError(event->captured ? ACL_ERROR_RT_EVENT_CAPTURED : ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                       "a stream that is being captured waits for an event from outside the capture");
  if (stream->capture && stream->capture != capture)
    throw RuntimeError(ACL_ERROR_STREAM_CAPTURE_CONFLICT,
                       "the stream and the event belong to different captures");
  stream->capture = capture;
  Seen& seen = capture->streams[stream];
  for (const auto& [other, count] : event->seen) seen[other] = std::max(seen[other], count);
  append_node(stream, {"aclrtStreamWaitEvent", [] {}});
  ++capture->graph->num_waits;
}

void wait_for(Stream* stream, Event* event) {
  std::uint64_t number = 0;
  {
    Lock lock(g_mutex);
    if (event->issued == 0 && !is_external(event))
      throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID,
                         "the stream would wait for an event that was never recorded");
    // an external event may be recorded after the wait is asked for
    number = is_external(event) ? std::max<std::uint64_t>(event->issued, 1) : event->issued;
  }
  enqueue(stream, "aclrtStreamWaitEvent", [event, number] {
    Lock lock(g_mutex);
    return !g_events.has(event) || event->reached >= number;
  });
}

// A wait on a value in device memory: true when the stream may continue.
bool value_holds(const std::uint64_t* place, std::uint64_t value, std::uint32_t condition) {
  const std::uint64_t now = __atomic_load_n(place, __ATOMIC_ACQUIRE);
  switch (condition) {
    case ACL_STREAM_WAIT_VALUE_GEQ:
      return static_cast<std::int64_t>(now - value) >= 0;
    case ACL_STREAM_WAIT_VALUE_EQ:
      return now == value;
    case ACL_STREAM_WAIT_VALUE_AND:
      return (now & value) != 0;
    case ACL_STREAM_WAIT_VALUE_NOR:
      return ~(now | value) != 0;
    default:
      throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "unknown condition " + std::to_string(condition));
  }
}

std::uint64_t* value_place(void* address) {
  if (!on_device(address, sizeof(std::uint64_t)) || reinterpret_cast<std::uintptr_t>(address) % 8 != 0)
    throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "the value must be eight aligned bytes of device memory");
  return static_cast<std::uint64_t*>(address);
}

aclError create_event(const char* call, aclrtEvent* event, std::uint32_t flag) {
  return reporting(call, [&] {
    require_device();
    Lock lock(g_mutex);
    if (g_events.size() >= options().events)
      throw RuntimeError(ACL_ERROR_RT_NO_EVENT_RESOURCE,
                         "the device's " + std::to_string(options().events) + " events are in use");
    auto made = std::make_unique<Event>();
    made->flags = flag;
    *event = g_events.add(std::move(made));
  });
}

aclError synchronize_event(const char* call, aclrtEvent handle, double timeout_s) {
  return reporting(call, [&] {
    Event* event = nullptr;
    {
      Lock lock(g_mutex);
      event = g_events.get(handle);
      refuse_captured_event(event);
      if (event->issued == 0 && !is_external(event)) return;  // nothing to wait for
    }
    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    while (true) {
      pump_waiting();
      {
        Lock lock(g_mutex);
        if (options().late_errors)
          g_streams.each([](const Stream* stream) {
            if (!stream->failure.empty()) throw RuntimeError(ACL_ERROR_RT_AICORE_EXCEPTION, stream->failure);
          });
        if (event->issued != 0 && event->reached >= event->issued) return;
      }
      if (std::chrono::steady_clock::now() > end)
        throw RuntimeError(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the event was not recorded in time");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

}  // namespace
}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

aclError aclrtCreateEvent(aclrtEvent* event) {
  return create_event("aclrtCreateEvent", event, ACL_EVENT_TIME_LINE);
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return create_event("aclrtCreateEventWithFlag", event, flag);
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return create_event("aclrtCreateEventExWithFlag", event, flag);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  return reporting("aclrtDestroyEvent", [&] {
    Lock lock(g_mutex);
    bool used = false;
    g_graphs.each([&](const Graph* graph) {
      for (const Node& node : graph->nodes) used = used || node.wait == handle;
    });
    if (used) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "a graph still waits for the event");
    g_events.remove(handle);
  });
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  return reporting("aclrtRecordEvent", [&] {
    Stream* stream = nullptr;
    Event* event = nullptr;
    std::uint64_t number = 0;
    {
      Lock lock(g_mutex);
      stream = stream_of(stream_handle);
      event = g_events.get(handle);
      if (stream->capture) {
        record_in_capture(stream, event);
        return;
      }
      event->captured = false;
      number = ++event->issued;
    }
    enqueue(stream, "aclrtRecordEvent", [event, number] {
      Lock lock(g_mutex);
      if (g_events.has(event)) reach(event, number);
      return true;
    });
    pump_waiting();
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  return reporting("aclrtStreamWaitEvent", [&] {
    Stream* stream = nullptr;
    Event* event = nullptr;
    {
      Lock lock(g_mutex);
      stream = stream_of(stream_handle);
      event = g_events.get(handle);
      if (stream->capture || (event->captured && !event->capture.expired())) {
        if (is_default_stream(stream))
          throw RuntimeError(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot join a capture");
        wait_in_capture(stream, event);
        return;
      }
      refuse_captured_event(event);
    }
    wait_for(stream, event);
  });
}

aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream_handle) {
  return reporting("aclrtResetEvent", [&] {
    Stream* stream = nullptr;
    Event* event = nullptr;
    auto reset = [](Event* which) {
      Lock lock(g_mutex);
      if (g_events.has(which)) which->issued = which->reached = 0;
    };
    {
      Lock lock(g_mutex);
      stream = stream_of(stream_handle);
      event = g_events.get(handle);
      if (stream->capture) {
        if (!is_external(event))
          throw RuntimeError(ACL_ERROR_RT_EVENT_CAPTURED,
                             "only an external event can be reset inside a capture");
        append_node(stream, {"aclrtResetEvent", [=] { reset(event); }});
        return;
      }
    }
    enqueue(stream, "aclrtResetEvent", [=] {
      reset(event);
      return true;
    });
  });
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  return reporting("aclrtQueryEventStatus", [&] {
    Lock lock(g_mutex);
    const Event* event = g_events.get(handle);
    refuse_captured_event(event);
    *status = event->reached >= event->issued ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                              : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  });
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  return reporting("aclrtQueryEventWaitStatus", [&] {
    Lock lock(g_mutex);
    const Event* event = g_events.get(handle);
    refuse_captured_event(event);
    *status =
        event->reached >= event->issued ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  });
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return synchronize_event("aclrtSynchronizeEvent", event, options().sync_timeout_s);
}
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) {
  return synchronize_event("aclrtSynchronizeEventWithTimeout", event,
                           timeout < 0 ? options().sync_timeout_s : timeout / 1000.0);
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start_handle, aclrtEvent end_handle) {
  return reporting("aclrtEventElapsedTime", [&] {
    Lock lock(g_mutex);
    const Event* start = g_events.get(start_handle);
    const Event* end = g_events.get(end_handle);
    for (const Event* event : {start, end}) {
      refuse_captured_event(event);
      if ((event->flags & ACL_EVENT_TIME_LINE) == 0)
        throw RuntimeError(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was made without timing");
      if (event->reached == 0)
        throw RuntimeError(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was never recorded");
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->when - start->when).count();
  });
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* timestamp) {
  return reporting("aclrtEventGetTimestamp", [&] {
    Lock lock(g_mutex);
    const Event* event = g_events.get(handle);
    refuse_captured_event(event);
    if (event->reached == 0)
      throw RuntimeError(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was never recorded");
    *timestamp = static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(event->when.time_since_epoch()).count());
  });
}

// torch_npu implements its external events with these: a wait in a graph, and a write that ends it.
aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  return reporting("aclrtValueWrite", [&] {
    std::uint64_t* place = value_place(address);
    submit(stream, "aclrtValueWrite", [=] {
      __atomic_store_n(place, value, __ATOMIC_RELEASE);
      pump_waiting();
    });
  });
}

aclError aclrtValueWait(void* address, uint64_t value, uint32_t condition, aclrtStream handle) {
  return reporting("aclrtValueWait", [&] {
    const std::uint64_t* place = value_place(address);
    value_holds(place, value, condition);
    auto ready = [=] { return value_holds(place, value, condition); };
    Stream* stream = nullptr;
    {
      Lock lock(g_mutex);
      stream = stream_of(handle);
      if (stream->capture) {
        append_node(stream, {"aclrtValueWait", [] {}, ready});
        return;
      }
    }
    enqueue(stream, "aclrtValueWait", ready);
  });
}
}

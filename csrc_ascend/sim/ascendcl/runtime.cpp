// The interface to the other libraries, the options, and the error message.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>

#include "state.h"

namespace ascend_sim {

std::mutex g_mutex;

namespace {

std::string environment(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

template <class T>
T number(const char* name, const char* fallback) {
  std::istringstream text(environment(name, fallback));
  T value{};
  if (!(text >> value) || !text.eof() || value < 0) {
    std::cerr << "[ascend-sim] " << name << " must be a number, not " << text.str() << std::endl;
    std::abort();
  }
  return value;
}

thread_local std::string t_error;

}  // namespace

const Options& options() {
  static const Options once{
      number<int>("ASCEND_SIM_DEVICES", "1"),
      number<std::size_t>("ASCEND_SIM_MEMORY", "8589934592"),
      environment("ASCEND_SIM_SOC", "Ascend910B3"),
      environment("ASCEND_SIM_CANN", "9.1"),
      number<double>("ASCEND_SIM_SYNC_TIMEOUT", "30"),
      number<int>("ASCEND_SIM_LATE_ERRORS", "0") != 0,
      environment("ASCEND_SIM_FAIL", ""),
      number<std::size_t>("ASCEND_SIM_STREAMS", "2048"),
      number<std::size_t>("ASCEND_SIM_EVENTS", "65536"),
      number<std::size_t>("ASCEND_SIM_NOTIFIES", "8192"),
      environment("ASCEND_SIM_CARDS", ""),
  };
  return once;
}

int cann() {
  const std::string& name = options().cann;
  if (name == "8.5") return 805;
  if (name == "9.0") return 900;
  if (name == "9.1") return 901;
  std::cerr << "[ascend-sim] ASCEND_SIM_CANN=" << name << " is not simulated: choose 8.5, 9.0 or 9.1"
            << std::endl;
  std::abort();
}

Soc soc() {
  const std::string& name = options().soc_name;
  if (name.rfind("Ascend310P", 0) == 0) return Soc::P310;
  if (name.rfind("Ascend910_93", 0) == 0) return Soc::A3;
  if (name.rfind("Ascend910B", 0) == 0) return Soc::A2;
  std::cerr << "[ascend-sim] ASCEND_SIM_SOC=" << name
            << " is not simulated: choose an Ascend910B, an Ascend910_93 or an Ascend310P" << std::endl;
  std::abort();
}

void set_error(const std::string& text) {
  t_error = text;
  std::cerr << "[ascend-sim] " << text << std::endl;
}

bool tracing() { return !environment("ASCEND_SIM_TRACE", "").empty(); }

void trace(const std::string& json_line) {
  if (!tracing()) return;
  static std::mutex mutex;
  static std::ofstream file(environment("ASCEND_SIM_TRACE", ""), std::ios::app);
  std::lock_guard<std::mutex> guard(mutex);
  // one write per line, since several processes may share the file
  file << json_line + "\n" << std::flush;
}

void poison(void* pointer, std::size_t bytes) {
  auto* words = static_cast<std::uint16_t*>(pointer);
  std::fill(words, words + bytes / 2, std::uint16_t{0x7FFF});
  if (bytes % 2 != 0) static_cast<unsigned char*>(pointer)[bytes - 1] = 0x7F;
}

namespace {

// Counts the runs of the operator that ASCEND_SIM_FAIL names, and fails the one that it asks for.
std::function<void()> failing(const std::string& name, std::function<void()> work) {
  const std::string& fails = options().fails;
  const std::size_t colon = fails.rfind(':');
  if (colon == std::string::npos || fails.compare(0, colon, name) != 0) return work;
  static std::atomic<long> runs{0};
  return [name, work = std::move(work), wanted = std::stol(fails.substr(colon + 1))] {
    if (++runs == wanted)
      throw RuntimeError(ACL_ERROR_RT_AICORE_EXCEPTION,
                         name + " failed on the device, as ASCEND_SIM_FAIL asks");
    work();
  };
}

}  // namespace

void submit(aclrtStream handle, std::string name, std::function<void()> work) {
  work = failing(name, std::move(work));
  Stream* stream = nullptr;
  Graph* updated = nullptr;
  std::size_t position = 0;
  {
    Lock lock(g_mutex);
    stream = stream_of(handle);
    if (stream->update) {
      Update& update = *stream->update;
      TaskGroup* group = update.group;
      std::size_t at = group->begin + update.position;
      if (at >= group->end)
        throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                           "the update of a task group brings more work than the group has: " + name);
      const std::string& expected = group->graph->nodes.at(at).name;
      if (expected != name)
        throw RuntimeError(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                           "the update of a task group brings " + name + " where it has " + expected);
      ++update.position;
      updated = group->graph;
      position = at;
    } else if (stream->capture) {
      append_node(stream, {std::move(name), std::move(work)});
      return;
    }
  }
  if (updated != nullptr) {
    // in the order of the stream: behind the events that it waits for
    enqueue(stream, "the update of " + name, [=, work = std::move(work)]() mutable {
      Lock lock(g_mutex);
      replace_work(updated, position, std::move(work));
      return true;
    });
    return;
  }
  enqueue(stream, std::move(name), [work = std::move(work)] {
    work();
    return true;
  });
}

bool is_capturing(aclrtStream handle) {
  Lock lock(g_mutex);
  return stream_of(handle)->capture != nullptr;
}

}  // namespace ascend_sim

extern "C" {

const char* aclGetRecentErrMsg() {
  // the caller reads it before the thread's next call
  thread_local std::string given;
  given = std::exchange(ascend_sim::t_error, {});
  return given.c_str();
}

const char* aclrtGetSocName() {
  ascend_sim::soc();  // refuses a chip that is not simulated
  return ascend_sim::options().soc_name.c_str();
}

void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
}

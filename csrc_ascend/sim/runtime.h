// Interface between the simulated Ascend libraries: defined by libascendcl, used by libopapi and libhccl.
//
// Work is a closure. `submit` hands it to a stream, which runs it at once, records it into the graph that is
// capturing the stream, or puts it in the place of a recorded node (task-group update). A closure may thus run
// later and more than once: it owns what it needs by value (tensors over device memory, copied scalars and
// lists), and keeps no pointer to a caller's handle.
#pragma once

#include <acl/acl_base.h>
#include <acl/acl_rt.h>

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#define ASCEND_SIM_EXPORT __attribute__((visibility("default")))

namespace ascend_sim {

// An argument that the operator does not support. Becomes ACLNN_ERR_PARAM_INVALID and, in Python, a
// RuntimeError with this text.
struct ASCEND_SIM_EXPORT Refusal : std::runtime_error {
  Refusal(const std::string& op, const std::string& argument, const std::string& why)
      : std::runtime_error(op + ": " + argument + ": " + why) {}
};

// A misuse of the runtime, with the error code of the real runtime.
struct ASCEND_SIM_EXPORT RuntimeError : std::runtime_error {
  RuntimeError(aclError error, const std::string& text) : std::runtime_error(text), code(error) {}
  aclError code;
};

constexpr aclError kParamInvalid = 161002;  // ACLNN_ERR_PARAM_INVALID
constexpr aclError kInnerError = 561103;    // ACLNN_ERR_INNER_NULLPTR's family: an operator failed inside

// Runs `work` on `stream` now, or records it, or replaces a node of a task group (see above). `name` is the
// operator ("aclnnAdd") or the runtime call; a task-group update must bring the same names in the same order.
// Rethrows exceptions of `work` if it runs now; in a graph they make the replay fail.
// Raises RuntimeError: an unknown stream, a capture that is broken, an update that does not fit its group.
ASCEND_SIM_EXPORT void submit(aclrtStream stream, std::string name, std::function<void()> work);

// Whether the stream (null: the current device's default stream) records instead of running.
ASCEND_SIM_EXPORT bool is_capturing(aclrtStream stream);

// Notifies of a device, with which streams and cards signal one another: taken for as long as the object lives.
class ASCEND_SIM_EXPORT Notifies {
 public:
  // RuntimeError if the device has not so many left.
  Notifies(int device, std::size_t count);
  ~Notifies();
  Notifies(const Notifies&) = delete;

 private:
  int device_;
  std::size_t count_;
};

// Whether all of [pointer, pointer + bytes) lies in one live device allocation or in mapped physical memory.
ASCEND_SIM_EXPORT bool on_device(const void* pointer, std::size_t bytes = 1);

// The device whose memory this is, or -1.
ASCEND_SIM_EXPORT int device_of(const void* pointer);

// The calling thread's device.
ASCEND_SIM_EXPORT int current_device();

// Sets the result of this thread's next aclGetRecentErrMsg; also written to stderr as "[ascend-sim] ...".
ASCEND_SIM_EXPORT void set_error(const std::string& text);

// The generation of CANN whose tables hold: 805, 900 or 901 for 8.5, 9.0 or 9.1.
ASCEND_SIM_EXPORT int cann();

enum class Soc { A2 /* Ascend910B */, A3 /* Ascend910_93 */, P310 /* Ascend310P */ };
ASCEND_SIM_EXPORT Soc soc();

// Appends a line to the file ASCEND_SIM_TRACE names; `tracing` tells whether it is worth making one.
ASCEND_SIM_EXPORT bool tracing();
ASCEND_SIM_EXPORT void trace(const std::string& json_line);

// The pattern of unwritten memory: NaN as float16, bfloat16, float32 and float64, far out of any range
// as an integer of two or more bytes. Fills `bytes` bytes; `pointer` is even.
ASCEND_SIM_EXPORT void poison(void* pointer, std::size_t bytes);

// The body of an exported C function: its exceptions become the error code and the recent message.
template <class Body>
aclError reporting(const char* call, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return ACL_SUCCESS;
  } catch (const Refusal& error) {
    set_error(error.what());
    return kParamInvalid;
  } catch (const RuntimeError& error) {
    set_error(std::string(call) + ": " + error.what());
    return error.code;
  } catch (const std::exception& error) {
    set_error(std::string(call) + ": " + error.what());
    return kInnerError;
  }
}

}  // namespace ascend_sim

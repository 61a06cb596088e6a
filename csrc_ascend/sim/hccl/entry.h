// Shared by the C functions of libhccl: handles, checks of arguments, error codes.
#pragma once

#include <memory>
#include <string>

#include "sim/hccl/communicator.h"
#include "sim/runtime.h"

namespace ascend_sim::hccl {

using Handle = std::shared_ptr<Communicator>;

// The communicator of a handle; work in a graph keeps it alive beyond HcclCommDestroy.
Handle handle_of(const char* function, HcclComm comm);

// Rejects a call; the message names the function and the argument.
void require(bool condition, const char* function, const std::string& argument, const std::string& why);

// The buffer holds `count` elements of a known type in device memory. Returns its bytes.
size_t require_buffer(const char* function, const char* argument, const void* buffer, uint64_t count,
                      HcclDataType dtype);

void require_rank(const char* function, const char* argument, uint32_t rank, const Communicator& communicator);

Call call_of(const char* function, HcclDataType dtype, uint64_t count, uint32_t root = 0, int operation = -1);

// Runs the body of a C function: exceptions become codes and the recent message.
template <typename Body>
HcclResult answering(const char* function, Body&& body) noexcept {
  try {
    body();
    return HCCL_SUCCESS;
  } catch (const Refusal& error) {
    set_error(error.what());
    return HCCL_E_PARA;
  } catch (const Failure& error) {
    set_error(std::string(function) + ": " + error.what());
    return error.code;
  } catch (const std::exception& error) {
    set_error(std::string(function) + ": " + error.what());
    return HCCL_E_INTERNAL;
  }
}

}  // namespace ascend_sim::hccl

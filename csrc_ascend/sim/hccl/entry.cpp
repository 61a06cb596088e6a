// Lifecycle of communicators: root info, joining, names, leaving.
#include "sim/hccl/entry.h"

#include <cstring>
#include <unordered_map>

namespace ascend_sim::hccl {
namespace {

std::mutex g_handles_mutex;
std::unordered_map<HcclComm, Handle> g_handles;

HcclResult join(const char* function, uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                const HcclCommConfig* config, HcclComm* comm) {
  return answering(function, [&] {
    require(root && comm, function, root ? "comm" : "rootInfo", "it must not be null");
    require(ranks > 0 && ranks <= kMaxRanks, function, "nRanks",
            "it must lie in [1, " + std::to_string(kMaxRanks) + "]");
    require(rank < ranks, function, "rank",
            std::to_string(rank) + " is outside [0, " + std::to_string(ranks) + ")");
    static std::atomic<uint64_t> number{0};
    std::string name = config ? config->hcclCommName : "";
    if (name.empty()) name = "ascend_sim_comm_" + std::to_string(number++);
    const auto handle =
        std::make_shared<Communicator>(*root, ranks, rank, name, config ? config->hcclExecTimeOut : 0);
    const std::lock_guard<std::mutex> guard(g_handles_mutex);
    g_handles[handle.get()] = handle;
    *comm = handle.get();
  });
}

}  // namespace

Handle handle_of(const char* function, HcclComm comm) {
  const std::lock_guard<std::mutex> guard(g_handles_mutex);
  const auto found = g_handles.find(comm);
  require(found != g_handles.end(), function, "comm", "it is no living communicator");
  return found->second;
}

void require(bool condition, const char* function, const std::string& argument, const std::string& why) {
  if (!condition) throw Refusal(function, argument, why);
}

size_t require_buffer(const char* function, const char* argument, const void* buffer, uint64_t count,
                      HcclDataType dtype) {
  const size_t size = element_size(dtype);
  require(size > 0, function, "dataType", "number " + std::to_string(dtype) + " is not supported");
  const size_t bytes = count * size;
  require(bytes == 0 || on_device(buffer, bytes), function, argument,
          "its " + std::to_string(bytes) + " bytes are not in device memory");
  return bytes;
}

void require_rank(const char* function, const char* argument, uint32_t rank, const Communicator& communicator) {
  require(rank < communicator.ranks(), function, argument,
          std::to_string(rank) + " is outside [0, " + std::to_string(communicator.ranks()) + ")");
}

Call call_of(const char* function, HcclDataType dtype, uint64_t count, uint32_t root, int operation) {
  Call call{};
  std::strncpy(call.function, function, sizeof call.function - 1);
  call.dtype = dtype;
  call.operation = operation;
  call.root = root;
  call.count = count;
  return call;
}

}  // namespace ascend_sim::hccl

using namespace ascend_sim::hccl;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  return answering("HcclGetRootInfo", [&] {
    require(root != nullptr, "HcclGetRootInfo", "rootInfo", "it must not be null");
    make_root_info(root);
  });
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return join("HcclCommInitRootInfo", ranks, root, rank, nullptr, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return join("HcclCommInitRootInfoConfig", ranks, root, rank, config, comm);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  return answering("HcclCommDestroy", [&] {
    const Handle handle = handle_of("HcclCommDestroy", comm);
    const std::lock_guard<std::mutex> guard(g_handles_mutex);
    g_handles.erase(comm);
  });
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
  return answering("HcclGetCommName", [&] {
    std::strncpy(name, handle_of("HcclGetCommName", comm)->name().c_str(), COMM_NAME_MAX_LENGTH - 1);
  });
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
  return answering("HcclGetRankSize", [&] { *ranks = handle_of("HcclGetRankSize", comm)->ranks(); });
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  return answering("HcclGetRankId", [&] { *rank = handle_of("HcclGetRankId", comm)->rank(); });
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* error) {
  return answering("HcclGetCommAsyncError",
                   [&] { *error = handle_of("HcclGetCommAsyncError", comm)->async_error(); });
}

// The fields of the configuration that are read: the name and the time limit.
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS:
      return "success";
    case HCCL_E_PARA:
      return "an argument is wrong";
    case HCCL_E_TIMEOUT:
      return "timeout";
    case HCCL_E_REMOTE:
      return "another rank has ended";
    default:
      return "failed";
  }
}

}  // extern "C"

// Devices, contexts, versions and the settings of a device.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "state.h"

namespace ascend_sim {
namespace {

// Handles of the devices' contexts: the primary one of each device and those made by aclrtCreateContext.
Registry<Context> g_contexts("context", ACL_ERROR_RT_CONTEXT_NULL);
std::map<int, Context*> g_primary;
thread_local Context* t_context = nullptr;

bool g_initialized = false;

// ASCEND_RT_VISIBLE_DEVICES: the cards a process sees, up to the first that does not exist.
std::vector<int> visible_cards() {
  const int all = options().devices;
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  std::vector<int> seen;
  if (list == nullptr) {
    for (int card = 0; card < all; ++card) seen.push_back(card);
    return seen;
  }
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    char* end = nullptr;
    long device = std::strtol(word.c_str(), &end, 10);
    if (word.empty() || *end != '\0' || device < 0 || device >= all ||
        std::count(seen.begin(), seen.end(), device) > 0)
      break;
    seen.push_back(static_cast<int>(device));
  }
  return seen;
}

int visible_devices() { return static_cast<int>(visible_cards().size()); }

Context* primary_context(int device) {
  auto found = g_primary.find(device);
  if (found != g_primary.end()) return found->second;
  return g_primary[device] = g_contexts.add(std::make_unique<Context>(Context{device}));
}

struct Cores {
  std::int64_t cube;
  std::int64_t vector;
};

// Cores of one die [ASCEND product documentation]: 310P has one kind of core that does both.
Cores cores() {
  switch (soc()) {
    case Soc::A2:
      return {20, 40};
    case Soc::A3:
      return {24, 48};
    case Soc::P310:
      return {8, 8};
  }
  return {0, 0};
}

std::map<int, std::int64_t>& settings() {
  static std::map<int, std::int64_t> values;
  return values;
}

std::map<std::pair<int, int>, std::uint32_t> g_core_limits;

std::uint32_t core_limit(int device, aclrtDevResLimitType kind) {
  auto found = g_core_limits.find({device, kind});
  if (found != g_core_limits.end()) return found->second;
  return static_cast<std::uint32_t>(kind == ACL_RT_DEV_RES_VECTOR_CORE ? cores().vector : cores().cube);
}

}  // namespace

void check_device(int device) {
  if (device < 0 || device >= visible_devices())
    throw RuntimeError(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(device) + ": " +
                                                          std::to_string(visible_devices()) + " are visible");
}

int card_of(int device) {
  check_device(device);
  return visible_cards()[device];
}

int require_device() {
  if (t_context == nullptr)
    throw RuntimeError(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device (aclrtSetDevice)");
  return t_context->device;
}

int current_device() { return require_device(); }

}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

aclError aclInit(const char*) {
  return reporting("aclInit", [] {
    Lock lock(g_mutex);
    if (g_initialized) throw RuntimeError(ACL_ERROR_REPEAT_INITIALIZE, "called twice");
    g_initialized = true;
  });
}

aclError aclFinalize() {
  Lock lock(g_mutex);
  g_initialized = false;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(visible_devices());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  return reporting("aclrtSetDevice", [&] {
    check_device(device);
    Lock lock(g_mutex);
    t_context = primary_context(device);
  });
}

aclError aclrtResetDevice(int32_t device) {
  return reporting("aclrtResetDevice", [&] {
    check_device(device);
    if (t_context != nullptr && t_context->device == device) t_context = nullptr;
  });
}

aclError aclrtGetDevice(int32_t* device) {
  // called before any device is set, and then returns only the error code
  if (t_context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = t_context->device;
  return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logic) {
  return reporting("aclrtGetLogicDevIdByUserDevId", [&] {
    check_device(user);
    *logic = user;
  });
}

aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  return reporting("aclrtCreateContext", [&] {
    check_device(device);
    Lock lock(g_mutex);
    t_context = g_contexts.add(std::make_unique<Context>(Context{device}));
    *context = t_context;
  });
}

aclError aclrtDestroyContext(aclrtContext context) {
  return reporting("aclrtDestroyContext", [&] {
    Lock lock(g_mutex);
    Context* found = g_contexts.get(context);
    if (g_primary[found->device] == found)
      throw RuntimeError(ACL_ERROR_RT_CONTEXT_RELEASE_ERROR, "a device's own context cannot be destroyed");
    if (t_context == found) t_context = nullptr;
    g_contexts.remove(context);
  });
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (t_context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = t_context;
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return reporting("aclrtSetCurrentContext", [&] {
    Lock lock(g_mutex);
    t_context = g_contexts.get(context);
  });
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  return reporting("aclrtGetPrimaryCtxState", [&] {
    check_device(device);
    Lock lock(g_mutex);
    if (flags != nullptr) *flags = 0;
    *active = g_primary.count(device) != 0 ? 1 : 0;
  });
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  return reporting("aclrtDeviceCanAccessPeer", [&] {
    check_device(device);
    check_device(peer);
    *can = device != peer ? 1 : 0;
  });
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  return reporting("aclrtDeviceEnablePeerAccess", [&] { check_device(peer); });
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value) {
  return reporting("aclGetDeviceCapability", [&] {
    check_device(static_cast<int>(device));
    if (info == ACL_DEVICE_INFO_AI_CORE_NUM) {
      *value = cores().cube;
    } else if (info == ACL_DEVICE_INFO_VECTOR_CORE_NUM) {
      *value = cores().vector;
    } else {
      throw RuntimeError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                         "capability " + std::to_string(info) + " is not simulated");
    }
  });
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  return reporting("aclrtGetDeviceInfo", [&] {
    check_device(static_cast<int>(device));
    switch (attribute) {
      case ACL_DEV_ATTR_AICORE_CORE_NUM:
      case ACL_DEV_ATTR_CUBE_CORE_NUM:
        *value = cores().cube;
        return;
      case ACL_DEV_ATTR_VECTOR_CORE_NUM:
        *value = cores().vector;
        return;
      case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
        *value = static_cast<int64_t>(options().memory);
        return;
      default:
        throw RuntimeError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                           "attribute " + std::to_string(attribute) + " is not simulated");
    }
  });
}

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType kind, uint32_t* value) {
  Lock lock(g_mutex);
  *value = core_limit(device, kind);
  return ACL_SUCCESS;
}

aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType kind, uint32_t value) {
  Lock lock(g_mutex);
  g_core_limits[{device, kind}] = value;
  return ACL_SUCCESS;
}

aclError aclrtResetDeviceResLimit(int32_t device) {
  Lock lock(g_mutex);
  std::erase_if(g_core_limits, [&](const auto& item) { return item.first.first == device; });
  return ACL_SUCCESS;
}

// Limits of cores change no result: a stream has its device's.
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType kind, uint32_t* value) {
  return reporting("aclrtGetStreamResLimit", [&] {
    int device = require_device();
    Lock lock(g_mutex);
    *value = core_limit(device, kind);
  });
}
aclError aclrtSetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
aclError aclrtResetStreamResLimit(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType kind, uint32_t* value) {
  return aclrtGetStreamResLimit(nullptr, kind, value);
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  *mode = ACL_RT_OVERFLOW_MODE_INFNAN;
  return ACL_SUCCESS;
}

// Determinism and the like: stored and returned, without effect since everything here is deterministic.
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  Lock lock(g_mutex);
  auto found = settings().find(option);
  *value = found == settings().end() ? 0 : found->second;
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  Lock lock(g_mutex);
  settings()[option] = value;
  return ACL_SUCCESS;
}
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return ACL_SUCCESS;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// The version that is simulated, "9.1.0".
aclError aclsysGetVersionStr(char*, char* version) {
  cann();  // refuses one that is not simulated
  std::strcpy(version, (options().cann + ".0").c_str());
  return ACL_SUCCESS;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::snprintf(version->majorVersion, sizeof version->majorVersion, "%d", cann() / 100);
  std::snprintf(version->minorVersion, sizeof version->minorVersion, "%d", cann() % 100);
  return aclsysGetVersionStr(nullptr, version->version);
}
aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
}

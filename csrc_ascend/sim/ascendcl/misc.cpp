// Other functions that torch_npu calls: profiling, dumps, custom kernels. Nothing is profiled or dumped, and
// loading a kernel's binary is an error.
#include <acl/acl_dump.h>
#include <acl/acl_mdl.h>

#include "state.h"

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }

// The profiler's interface, of which torch_npu takes the types from its own headers.
int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
uint64_t MsprofSysCycleTime() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
}

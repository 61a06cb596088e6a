// The objects behind the opaque handles of the aclnn interface: descriptors made by the caller, read by
// operators.
#pragma once

#include <acl/acl_base.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sim/opapi/aten.h"
#include "sim/opapi/costs.h"

using aclnnStatus = int32_t;

// A view of device memory. `view` aliases the caller's bytes; it owns nothing.
struct aclTensor {
  at::Tensor view;
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> storage_shape;
  // Set by operators whose result size is known only after the run (nonzero); the caller reads it with
  // aclGetViewShape after the launch. Shared, because a launch may outlive the handle.
  std::shared_ptr<std::vector<int64_t>> shape;
};

struct aclScalar {
  at::Scalar value;
  aclDataType dtype;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;  // an entry may be null
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};

// A planned launch: made by aclnnXGetWorkspaceSize, consumed by aclnnX.
struct aclOpExecutor {
  std::string name;
  std::string trace;
  std::function<void()> work;
  ascend_sim::Cost cost;
};

namespace ascend_sim {

constexpr aclnnStatus kSuccess = 0;
constexpr aclnnStatus kNullPointer = 161001;
constexpr aclnnStatus kInvalidArgument = 161002;
constexpr aclnnStatus kExecutionFailed = 561000;

// The torch dtype with the same bytes. 4-bit integers, two in a byte, come as uint8. Throws for types that the
// simulated chips do not have.
at::ScalarType torch_dtype(aclDataType dtype);

}  // namespace ascend_sim

// The aclCreate*/aclDestroy* part of the interface: descriptors of tensors, scalars, arrays and lists.
#include "sim/opapi/handles.h"

#include <stdexcept>
#include <string>

#include "sim/runtime.h"

namespace ascend_sim {

at::ScalarType torch_dtype(aclDataType dtype) {
  switch (static_cast<int>(dtype)) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
    case ACL_INT4:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_BOOL:
      return at::kBool;
    default:
      throw std::invalid_argument("data type number " + std::to_string(dtype) +
                                  " is not known to the simulator");
  }
}

}  // namespace ascend_sim

namespace {

// A descriptor that cannot be made is answered with a null handle; the operator that gets it refuses by name.
template <typename Make>
auto guarded(const char* function, Make make) -> decltype(make()) {
  try {
    return make();
  } catch (const std::exception& error) {
    ascend_sim::set_error(std::string(function) + ": " + error.what());
    return nullptr;
  }
}

// Elements of `dims` in memory: a 4-bit tensor is wrapped as bytes, two elements each.
std::vector<int64_t> byte_dims(std::vector<int64_t> dims, aclDataType dtype) {
  if (dtype == ACL_INT4 && !dims.empty()) dims.back() = (dims.back() + 1) / 2;
  return dims;
}

at::Tensor wrap(const std::vector<int64_t>& dims, const std::vector<int64_t>& strides, int64_t offset,
                aclDataType dtype, void* data) {
  const at::ScalarType type = ascend_sim::torch_dtype(dtype);
  const auto options = at::TensorOptions().dtype(type);
  if (dtype == ACL_INT4)
    return at::from_blob(static_cast<char*>(data) + offset / 2, byte_dims(dims, dtype), options);
  char* first = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(type));
  return at::from_blob(first, dims, strides, options);
}

template <typename T>
T read_as(const void* value) {
  return *static_cast<const T*>(value);
}

at::Scalar read_scalar(const void* value, aclDataType dtype) {
  switch (static_cast<int>(dtype)) {
    case ACL_FLOAT:
      return static_cast<double>(read_as<float>(value));
    case ACL_DOUBLE:
      return read_as<double>(value);
    case ACL_FLOAT16:
      return static_cast<double>(static_cast<float>(read_as<at::Half>(value)));
    case ACL_BF16:
      return static_cast<double>(static_cast<float>(read_as<at::BFloat16>(value)));
    case ACL_BOOL:
      return read_as<bool>(value);
    case ACL_INT8:
      return static_cast<int64_t>(read_as<int8_t>(value));
    case ACL_UINT8:
      return static_cast<int64_t>(read_as<uint8_t>(value));
    case ACL_INT16:
      return static_cast<int64_t>(read_as<int16_t>(value));
    case ACL_INT32:
      return static_cast<int64_t>(read_as<int32_t>(value));
    case ACL_INT64:
      return read_as<int64_t>(value);
    default:
      throw std::invalid_argument("a scalar of data type number " + std::to_string(dtype) +
                                  " is not supported");
  }
}

template <typename Handle>
aclnnStatus destroy(const Handle* handle) {
  delete handle;
  return ascend_sim::kSuccess;
}

aclnnStatus copy_out(const std::vector<int64_t>& values, int64_t** out, uint64_t* count) {
  *count = values.size();
  *out = new int64_t[values.size() + 1];
  std::copy(values.begin(), values.end(), *out);
  return ascend_sim::kSuccess;
}

}  // namespace

#define ASCEND_SIM_API extern "C" __attribute__((visibility("default")))

ASCEND_SIM_API aclTensor* aclCreateTensor(const int64_t* view_dims, uint64_t view_count, aclDataType dtype,
                                          const int64_t* strides, int64_t offset, aclFormat format,
                                          const int64_t* storage_dims, uint64_t storage_count, void* data) {
  return guarded("aclCreateTensor", [&] {
    const std::vector<int64_t> dims(view_dims, view_dims + view_count);
    const auto packed = c10::contiguous_strides(dims);
    const int64_t* first = strides ? strides : packed.data();
    const std::vector<int64_t> steps(first, first + view_count);
    std::vector<int64_t> storage;
    if (storage_dims) storage.assign(storage_dims, storage_dims + storage_count);
    return new aclTensor{wrap(dims, steps, offset, dtype, data), dtype, format, std::move(storage),
                         std::make_shared<std::vector<int64_t>>(dims)};
  });
}

ASCEND_SIM_API aclnnStatus aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }

// The caller frees the arrays with delete[].
ASCEND_SIM_API aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* count) {
  return tensor ? copy_out(*tensor->shape, dims, count) : ascend_sim::kNullPointer;
}

ASCEND_SIM_API aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* count) {
  return tensor ? copy_out(tensor->view.strides().vec(), strides, count) : ascend_sim::kNullPointer;
}

ASCEND_SIM_API aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dtype) {
  if (!tensor) return ascend_sim::kNullPointer;
  *dtype = tensor->dtype;
  return ascend_sim::kSuccess;
}

ASCEND_SIM_API aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format) {
  if (!tensor) return ascend_sim::kNullPointer;
  *format = tensor->format;
  return ascend_sim::kSuccess;
}

ASCEND_SIM_API aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  return guarded("aclCreateScalar", [&] { return new aclScalar{read_scalar(value, dtype), dtype}; });
}
ASCEND_SIM_API aclnnStatus aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }

ASCEND_SIM_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
ASCEND_SIM_API aclnnStatus aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }

ASCEND_SIM_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
ASCEND_SIM_API aclnnStatus aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }

ASCEND_SIM_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
ASCEND_SIM_API aclnnStatus aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }

// Destroying a list destroys its members too.
ASCEND_SIM_API aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  return new aclTensorList{{tensors, tensors + count}};
}
ASCEND_SIM_API aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  if (list) {
    for (const aclTensor* tensor : list->tensors) delete tensor;
  }
  return destroy(list);
}

ASCEND_SIM_API aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t count) {
  return new aclScalarList{{scalars, scalars + count}};
}
ASCEND_SIM_API aclnnStatus aclDestroyScalarList(const aclScalarList* list) {
  if (list) {
    for (const aclScalar* scalar : list->scalars) delete scalar;
  }
  return destroy(list);
}

ASCEND_SIM_API aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) { return destroy(executor); }

#include "npu/bind/device.h"

#include <ATen/ops/empty.h>

#include <map>
#include <mutex>
#include <string>

namespace ascend_npu {

int64_t vector_cores(const at::Tensor& tensor) {
  int64_t count = 0;
  const auto status = aclGetDeviceCapability(static_cast<uint32_t>(tensor.get_device()),
                                             ACL_DEVICE_INFO_VECTOR_CORE_NUM, &count);
  TORCH_CHECK(status == ACL_SUCCESS && count > 0,
              "the NPU does not tell how many vector cores it has: ACL error ", status);
  return count;
}

at::Tensor copy_to_device(const void* bytes, size_t count, const at::Tensor& like) {
  static std::mutex mutex;
  // never freed: the device may be finalised first
  static auto& copies = *new std::map<std::pair<c10::DeviceIndex, std::string>, at::Tensor>;
  std::string content(static_cast<const char*>(bytes), count);
  const std::lock_guard<std::mutex> guard(mutex);
  at::Tensor& tensor = copies[{like.device().index(), content}];
  if (!tensor.defined()) {
    const at::Tensor host = at::empty({static_cast<int64_t>(count)}, at::TensorOptions().dtype(at::kByte));
    std::copy(content.begin(), content.end(), host.mutable_data_ptr<uint8_t>());
    tensor = host.to(like.device());
  }
  return tensor;
}

void check_dense(const at::Tensor& tensor, const char* name, at::ScalarType type) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == type, name, " must be ", type, ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous");
}

DataType data_type(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16, name,
                    " must be float16 or bfloat16, got ", tensor.scalar_type());
  return tensor.scalar_type() == at::kHalf ? DataType::kFloat16 : DataType::kBFloat16;
}

}  // namespace ascend_npu

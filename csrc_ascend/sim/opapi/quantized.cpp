#include "sim/opapi/quantized.h"

namespace ascend_sim {

at::Tensor unpack_int4(const at::Tensor& words) {
  const at::Tensor shifts = at::arange(0, 32, 4, at::kInt);
  at::Tensor nibbles = at::bitwise_and(at::bitwise_right_shift(words.unsqueeze(-1), shifts), 15);
  nibbles = at::where(nibbles.ge(8), nibbles - 16, nibbles).to(at::kChar);
  std::vector<int64_t> shape = words.sizes().vec();
  shape.back() *= 8;
  return nibbles.reshape(shape);
}

at::Tensor pack_int4(const at::Tensor& values) {
  std::vector<int64_t> shape = values.sizes().vec();
  shape.back() /= 8;
  shape.push_back(8);
  const at::Tensor nibbles = at::bitwise_and(values.to(at::kLong), 15).reshape(shape);
  return at::bitwise_left_shift(nibbles, at::arange(0, 32, 4, at::kLong)).sum(-1).to(at::kInt);
}

void set_quantized(const Out& out, const at::Tensor& values) {
  if (out.scalar_type() == at::kInt) {
    out.set(pack_int4(at::round(values).clamp(-8, 7)));
  } else {
    out.set(at::round(values).clamp(-128, 127).to(at::kChar));
  }
}

at::Tensor int8_values(const In& tensor, const at::Tensor& nd) {
  if (tensor.scalar_type() != at::kInt) return nd;
  const bool along_rows = tensor.dim() >= 2 && tensor.stride(-1) != 1 && tensor.stride(-2) == 1;
  return along_rows ? unpack_int4(nd.transpose(-1, -2).contiguous()).transpose(-1, -2)
                    : unpack_int4(nd.contiguous());
}

at::Tensor scale_values(const at::Tensor& scale) {
  if (scale.scalar_type() != at::kLong && scale.scalar_type() != at::kUInt64) return scale.to(at::kFloat);
  return scale.contiguous().view(at::kFloat).reshape({-1, 2}).select(1, 0).reshape(scale.sizes());
}

}  // namespace ascend_sim

// Integers of low precision: packing of 4-bit values and rounding to a dtype's range.
#pragma once

#include "sim/opapi/arguments.h"

namespace ascend_sim {

// The 4-bit values of int32 words, eight along the last dimension, lowest bits first, as int8.
at::Tensor unpack_int4(const at::Tensor& words);

// The inverse: int values in [-8, 7] as int32 words.
at::Tensor pack_int4(const at::Tensor& values);

// Values rounded to the nearest even integer and cut to the range of `out` (int8; int32 holds packed 4-bit
// values).
void set_quantized(const Out& out, const at::Tensor& values);

// Integer matrices as int8 whatever their packing. A transposed view of packed words is packed along its rows.
at::Tensor int8_values(const In& tensor, const at::Tensor& nd);

// The scale in the lower half of the 64-bit parameters that the matrix unit takes; other dtypes as float32.
at::Tensor scale_values(const at::Tensor& scale);

}  // namespace ascend_sim

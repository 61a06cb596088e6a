// Typed arguments of operators: what a row of the table declares, checked and parsed from the handles of the C
// call.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/opapi/handles.h"

namespace ascend_sim {

// Rejects the call being planned or run, naming the operator, unless `condition` holds.
void require(bool condition, std::string_view argument, const std::string& why);

// A set of dtypes an argument may have.
using Dtypes = std::vector<at::ScalarType>;
inline const Dtypes kHalfs = {at::kHalf, at::kBFloat16};
inline const Dtypes kFloats = {at::kFloat, at::kHalf, at::kBFloat16};
inline const Dtypes kFloatsAndDouble = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};
inline const Dtypes kIndices = {at::kInt, at::kLong};
inline const Dtypes kInts = {at::kChar, at::kByte, at::kShort, at::kInt, at::kLong};
inline const Dtypes kBitwise = {at::kBool, at::kChar, at::kByte, at::kShort, at::kInt, at::kLong};
inline const Dtypes kReal = {at::kFloat, at::kHalf,  at::kBFloat16, at::kDouble, at::kChar,
                             at::kByte,  at::kShort, at::kInt,      at::kLong};

inline const Dtypes kAny = {at::kFloat, at::kHalf,  at::kBFloat16, at::kDouble, at::kChar,
                            at::kByte,  at::kShort, at::kInt,      at::kLong,   at::kBool};

// A tensor that an operator reads. It is an at::Tensor and goes into ATen expressions as it is.
struct In : at::Tensor {
  In() = default;
  In(const aclTensor& handle, std::string argument);

  bool is_int4() const { return dtype_number == ACL_INT4; }
  // The dtype is one of `allowed`.
  const In& in(const Dtypes& allowed) const;
  // The dtype is that of `other`.
  const In& like(const In& other) const;
  // The number of dimensions lies within [low, high].
  const In& rank(int64_t low, int64_t high) const;
  const In& shaped(at::IntArrayRef wanted) const;
  // The bytes follow one another without gaps.
  const In& dense() const;

  // For dtype and messages: what the descriptor says beyond the view.
  std::string name;
  aclDataType dtype_number = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_ND;
  std::vector<int64_t> storage_shape;

 protected:
  In(const aclTensor& handle, std::string argument, bool fractal);
};

// A tensor that may be in the fractal layout of weights.
struct Weight : In {
  Weight(const aclTensor& handle, std::string argument) : In(handle, std::move(argument), true) {}
  // Values in the logical shape, whatever the layout. Call it when the operator runs.
  at::Tensor nd() const;
};

// A tensor that an operator writes, or reads and writes.
struct Out : In {
  Out() = default;
  Out(const aclTensor& handle, std::string argument);

  // Stores a result, cast to the dtype of this tensor; its shape must be exactly this tensor's.
  void set(const at::Tensor& result) const;
  // Stores a result whose size is known only after the run at the front of this tensor, and reports its shape.
  void set_front(const at::Tensor& result) const;
  // Rejects partially overlapping memory; in-place operators have the same view for both.
  void refuse_overlap(const In& other) const;

 private:
  std::shared_ptr<std::vector<int64_t>> shape_;
};

inline int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

using Maybe = std::optional<In>;
using MaybeOut = std::optional<Out>;
using InList = std::vector<In>;
using WeightList = std::vector<Weight>;
using MaybeList = std::vector<Maybe>;
using OutList = std::vector<Out>;
using Number = at::Scalar;
using MaybeNumber = std::optional<at::Scalar>;
using Numbers = std::vector<at::Scalar>;
// A null array is an absent one.
using Ints = std::vector<int64_t>;
using MaybeInts = std::optional<Ints>;
using Floats = std::vector<float>;
using Bools = std::vector<bool>;
// A null string is an empty one.
struct Text : std::string {
  using std::string::string;
};
// A dtype given as an argument of its own.
struct Dtype {
  at::ScalarType type;
};

// The conversion of a declared type from the C interface: its C type, the checked parsing, and its trace.
template <typename T>
struct Argument;

#define ASCEND_SIM_ARGUMENT(type, c_type)                     \
  template <>                                                 \
  struct Argument<type> {                                     \
    using C = c_type;                                         \
    static type parse(c_type value, const std::string& name); \
    static std::string trace(c_type value);                   \
  }
ASCEND_SIM_ARGUMENT(In, const aclTensor*);
ASCEND_SIM_ARGUMENT(Weight, const aclTensor*);
ASCEND_SIM_ARGUMENT(Out, const aclTensor*);
ASCEND_SIM_ARGUMENT(Maybe, const aclTensor*);
ASCEND_SIM_ARGUMENT(MaybeOut, const aclTensor*);
ASCEND_SIM_ARGUMENT(InList, const aclTensorList*);
ASCEND_SIM_ARGUMENT(WeightList, const aclTensorList*);
ASCEND_SIM_ARGUMENT(MaybeList, const aclTensorList*);
ASCEND_SIM_ARGUMENT(OutList, const aclTensorList*);
ASCEND_SIM_ARGUMENT(Number, const aclScalar*);
ASCEND_SIM_ARGUMENT(MaybeNumber, const aclScalar*);
ASCEND_SIM_ARGUMENT(Numbers, const aclScalarList*);
ASCEND_SIM_ARGUMENT(Ints, const aclIntArray*);
ASCEND_SIM_ARGUMENT(MaybeInts, const aclIntArray*);
ASCEND_SIM_ARGUMENT(Floats, const aclFloatArray*);
ASCEND_SIM_ARGUMENT(Bools, const aclBoolArray*);
ASCEND_SIM_ARGUMENT(Text, const char*);
ASCEND_SIM_ARGUMENT(Dtype, aclDataType);
ASCEND_SIM_ARGUMENT(bool, bool);
ASCEND_SIM_ARGUMENT(int8_t, int8_t);
ASCEND_SIM_ARGUMENT(int32_t, int32_t);
ASCEND_SIM_ARGUMENT(int64_t, int64_t);
ASCEND_SIM_ARGUMENT(uint64_t, uint64_t);
ASCEND_SIM_ARGUMENT(float, float);
ASCEND_SIM_ARGUMENT(double, double);
#undef ASCEND_SIM_ARGUMENT

}  // namespace ascend_sim

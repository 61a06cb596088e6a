// Parsing of arguments: handles of the C interface to the typed arguments of rows, and their trace.
#include "sim/opapi/arguments.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "sim/runtime.h"

namespace ascend_sim {
namespace {

std::string dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kDouble:
      return "float64";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(type);
  }
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  std::ostringstream text;
  text.precision(std::numeric_limits<double>::max_digits10);
  text << value;
  return text.str();
}

std::string scalar_text(const at::Scalar& value) {
  if (value.isBoolean()) return value.toBool() ? "true" : "false";
  if (value.isIntegral(false)) return std::to_string(value.toLong());
  return number_text(value.toDouble());
}

std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

template <typename Values, typename Text>
std::string list_text(const Values& values, Text text) {
  std::string result = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i) result += ", ";
    result += text(values[i]);
  }
  return result + "]";
}

std::string ints_text(at::IntArrayRef values) {
  return list_text(values, [](int64_t value) { return std::to_string(value); });
}

std::string tensor_text(const aclTensor* tensor) {
  if (!tensor) return "null";
  std::string text = "{\"shape\": " + ints_text(*tensor->shape) + ", \"dtype\": " +
                     json_string(tensor->dtype == ACL_INT4 ? "int4" : dtype_name(tensor->view.scalar_type()));
  if (!tensor->view.is_contiguous()) text += ", \"strides\": " + ints_text(tensor->view.strides());
  if (tensor->format == ACL_FORMAT_FRACTAL_NZ) {
    text += ", \"format\": \"FRACTAL_NZ\", \"storage\": " + ints_text(tensor->storage_shape);
  }
  return text + "}";
}

// Bytes from the first to the last element that the view reaches.
size_t spanned_bytes(const at::Tensor& view) {
  int64_t last = 0;
  for (int64_t d = 0; d < view.dim(); ++d) last += (view.size(d) - 1) * view.stride(d);
  return static_cast<size_t>((last + 1) * view.element_size());
}

bool has_own_overlap(const at::Tensor& view) {
  for (int64_t d = 0; d < view.dim(); ++d) {
    if (view.size(d) > 1 && view.stride(d) == 0) return true;
  }
  return false;
}

std::string join(const Dtypes& types) {
  std::string text;
  for (const at::ScalarType type : types) text += (text.empty() ? "" : ", ") + dtype_name(type);
  return text;
}

template <typename T>
T tensor_argument(const aclTensor* handle, const std::string& name) {
  require(handle != nullptr, name, "a tensor is required");
  return T(*handle, name);
}

template <typename T>
std::optional<T> optional_argument(const aclTensor* handle, const std::string& name) {
  // The caller passes an undefined tensor as null, or as one without elements and without memory.
  if (!handle || (handle->view.numel() == 0 && handle->view.const_data_ptr() == nullptr)) return std::nullopt;
  return T(*handle, name);
}

template <typename T>
std::vector<T> list_argument(const aclTensorList* handle, const std::string& name) {
  require(handle != nullptr, name, "a list of tensors is required");
  std::vector<T> list;
  for (size_t i = 0; i < handle->tensors.size(); ++i) {
    list.push_back(tensor_argument<T>(handle->tensors[i], name + "[" + std::to_string(i) + "]"));
  }
  return list;
}

std::string tensors_text(const aclTensorList* list) {
  return list ? list_text(list->tensors, tensor_text) : "null";
}

MaybeList optional_list_argument(const aclTensorList* handle, const std::string& name) {
  MaybeList list;
  for (size_t i = 0; handle && i < handle->tensors.size(); ++i) {
    const aclTensor* entry = handle->tensors[i];
    list.push_back(entry ? Maybe(In(*entry, name + "[" + std::to_string(i) + "]")) : std::nullopt);
  }
  return list;
}

Number number_argument(const aclScalar* handle, const std::string& name) {
  require(handle != nullptr, name, "a scalar is required");
  return handle->value;
}

MaybeNumber optional_number_argument(const aclScalar* handle, const std::string&) {
  return handle ? MaybeNumber(handle->value) : std::nullopt;
}

std::string number_trace(const aclScalar* handle) { return handle ? scalar_text(handle->value) : "null"; }

Numbers numbers_argument(const aclScalarList* handle, const std::string& name) {
  Numbers numbers;
  for (size_t i = 0; handle && i < handle->scalars.size(); ++i) {
    numbers.push_back(number_argument(handle->scalars[i], name));
  }
  return numbers;
}

std::string numbers_trace(const aclScalarList* handle) {
  return handle ? list_text(handle->scalars, number_trace) : "null";
}

template <typename Array>
auto array_argument(const Array* handle, const std::string&) -> decltype(handle->values) {
  return handle ? handle->values : decltype(handle->values)();
}

MaybeInts optional_array_argument(const aclIntArray* handle, const std::string&) {
  return handle ? MaybeInts(handle->values) : std::nullopt;
}

template <typename Array>
std::string array_trace(const Array* handle) {
  return handle ? list_text(handle->values, [](auto value) { return scalar_text(value); }) : "null";
}

Text text_argument(const char* text, const std::string&) { return Text(text ? text : ""); }
std::string text_trace(const char* text) { return text ? json_string(text) : "null"; }

Dtype dtype_argument(aclDataType dtype, const std::string&) { return Dtype{torch_dtype(dtype)}; }
std::string dtype_trace(aclDataType dtype) { return json_string(dtype_name(torch_dtype(dtype))); }

template <typename T>
T plain_argument(T value, const std::string&) {
  return value;
}
template <typename T>
std::string integer_trace(T value) {
  return std::to_string(value);
}

// Trims the matrix dimensions of a fractal weight from blocks (N1, M1, rows, columns) to (M, N).
at::Tensor from_fractal(const at::Tensor& blocks, int64_t rows, int64_t columns) {
  const int64_t d = blocks.dim();
  at::Tensor matrix = blocks.transpose(d - 4, d - 3).transpose(d - 3, d - 2);  // (M1, rows, N1, columns)
  std::vector<int64_t> shape(matrix.sizes().begin(), matrix.sizes().end() - 4);
  shape.push_back(matrix.size(-4) * matrix.size(-3));
  shape.push_back(matrix.size(-2) * matrix.size(-1));
  return matrix.reshape(shape).narrow(-2, 0, rows).narrow(-1, 0, columns);
}

}  // namespace

In::In(const aclTensor& handle, std::string argument) : In(handle, std::move(argument), false) {}

In::In(const aclTensor& handle, std::string argument, bool fractal)
    : at::Tensor(handle.view),
      name(std::move(argument)),
      dtype_number(handle.dtype),
      format(handle.format),
      storage_shape(handle.storage_shape) {
  if (numel() == 0) return;
  require(fractal || format != ACL_FORMAT_FRACTAL_NZ, name, "the format FRACTAL_NZ is not supported here");
  require(on_device(data_ptr(), spanned_bytes(*this)), name, "the tensor is not in device memory");
  require(reinterpret_cast<uintptr_t>(data_ptr()) % element_size() == 0, name,
          "the address is not aligned to the size of an element");
}

const In& In::in(const Dtypes& allowed) const {
  require(std::find(allowed.begin(), allowed.end(), scalar_type()) != allowed.end(), name,
          "dtype " + dtype_name(scalar_type()) + " is not supported (" + join(allowed) + ")");
  return *this;
}

const In& In::like(const In& other) const {
  require(scalar_type() == other.scalar_type(), name,
          "dtype " + dtype_name(scalar_type()) + " differs from " + dtype_name(other.scalar_type()) + " of " +
              other.name);
  return *this;
}

const In& In::rank(int64_t low, int64_t high) const {
  require(dim() >= low && dim() <= high, name,
          "shape " + ints_text(sizes()) + " needs " + std::to_string(low) +
              (low == high ? "" : " to " + std::to_string(high)) + " dimensions");
  return *this;
}

const In& In::shaped(at::IntArrayRef wanted) const {
  require(sizes() == wanted, name, "shape " + ints_text(sizes()) + " must be " + ints_text(wanted));
  return *this;
}

const In& In::dense() const {
  require(is_contiguous(), name, "the tensor must be contiguous");
  return *this;
}

at::Tensor Weight::nd() const {
  if (format != ACL_FORMAT_FRACTAL_NZ) return *this;
  require(dim() >= 2 && storage_shape.size() == static_cast<size_t>(dim()) + 2, name,
          "the storage " + ints_text(storage_shape) + " is no fractal layout of " + ints_text(sizes()));
  const bool transposed = stride(-1) != 1;
  const int64_t rows = size(transposed ? -1 : -2), columns = size(transposed ? -2 : -1);
  const at::Tensor blocks = at::from_blob(data_ptr(), storage_shape, options());
  const at::Tensor matrix = from_fractal(blocks, rows, columns);
  return transposed ? matrix.transpose(-1, -2) : matrix;
}

Out::Out(const aclTensor& handle, std::string argument)
    : In(handle, std::move(argument)), shape_(handle.shape) {
  require(numel() == 0 || !has_own_overlap(*this), name, "elements of the tensor that is written share memory");
}

void Out::refuse_overlap(const In& other) const {
  if (numel() == 0 || other.numel() == 0) return;
  // Interleaved views reach over one another without sharing an element; only gapless ones are judged.
  if (!is_non_overlapping_and_dense() || !other.is_non_overlapping_and_dense()) return;
  const auto* first = static_cast<const char*>(data_ptr());
  const auto* other_first = static_cast<const char*>(other.data_ptr());
  const bool apart = first + spanned_bytes(*this) <= other_first || other_first + spanned_bytes(other) <= first;
  const bool same = first == other_first && sizes() == other.sizes() && strides() == other.strides();
  require(apart || same, name, "its memory overlaps that of " + other.name);
}

void Out::set(const at::Tensor& result) const {
  require(result.sizes() == sizes(), name,
          "shape " + ints_text(sizes()) + " must be " + ints_text(result.sizes()));
  copy_(result);
}

void Out::set_front(const at::Tensor& result) const {
  require(result.numel() <= numel(), name,
          "its " + std::to_string(numel()) + " elements cannot hold " + ints_text(result.sizes()));
  flatten().narrow(0, 0, result.numel()).copy_(result.flatten());
  *shape_ = result.sizes().vec();
}

#define PARSED(type, c_type, parser, tracer)                                                        \
  type Argument<type>::parse(c_type value, const std::string& name) { return parser(value, name); } \
  std::string Argument<type>::trace(c_type value) { return tracer(value); }
PARSED(In, const aclTensor*, tensor_argument<In>, tensor_text)
PARSED(Weight, const aclTensor*, tensor_argument<Weight>, tensor_text)
PARSED(Out, const aclTensor*, tensor_argument<Out>, tensor_text)
PARSED(Maybe, const aclTensor*, optional_argument<In>, tensor_text)
PARSED(MaybeOut, const aclTensor*, optional_argument<Out>, tensor_text)
PARSED(InList, const aclTensorList*, list_argument<In>, tensors_text)
PARSED(WeightList, const aclTensorList*, list_argument<Weight>, tensors_text)
PARSED(MaybeList, const aclTensorList*, optional_list_argument, tensors_text)
PARSED(OutList, const aclTensorList*, list_argument<Out>, tensors_text)
PARSED(Number, const aclScalar*, number_argument, number_trace)
PARSED(MaybeNumber, const aclScalar*, optional_number_argument, number_trace)
PARSED(Numbers, const aclScalarList*, numbers_argument, numbers_trace)
PARSED(Ints, const aclIntArray*, array_argument, array_trace)
PARSED(MaybeInts, const aclIntArray*, optional_array_argument, array_trace)
PARSED(Floats, const aclFloatArray*, array_argument, array_trace)
PARSED(Bools, const aclBoolArray*, array_argument, array_trace)
PARSED(Text, const char*, text_argument, text_trace)
PARSED(Dtype, aclDataType, dtype_argument, dtype_trace)
PARSED(bool, bool, plain_argument, scalar_text)
PARSED(int8_t, int8_t, plain_argument, integer_trace)
PARSED(int32_t, int32_t, plain_argument, integer_trace)
PARSED(int64_t, int64_t, plain_argument, integer_trace)
PARSED(uint64_t, uint64_t, plain_argument, integer_trace)
PARSED(float, float, plain_argument, number_text)
PARSED(double, double, plain_argument, number_text)
#undef PARSED

}  // namespace ascend_sim

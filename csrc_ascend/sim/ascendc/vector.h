// The vector unit's instructions in their (destination, sources, count) form.
//
// Operands begin at multiples of 32 bytes of the unified buffer; arithmetic supports the chip's types (bfloat16
// can only be cast). half is computed in float and rounded once.
#pragma once

#include "copy.h"

namespace AscendC {

enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

namespace detail {

template <class T>
constexpr bool is_float = std::is_same_v<T, float> || std::is_same_v<T, half>;
template <class T>
constexpr bool is_number = is_float<T> || std::is_same_v<T, std::int16_t> || std::is_same_v<T, std::int32_t>;
template <class T>
constexpr bool is_bits = std::is_same_v<T, std::int16_t> || std::is_same_v<T, std::uint16_t>;

template <class T>
using Wide = std::conditional_t<is_float<T>, float, T>;

template <class T>
void require_operand(const LocalTensor<T>& tensor, std::uint32_t count, const char* call) {
  if (count == 0) violate(call, "a count of 0");
  if (tensor.data() == nullptr) violate(call, "an operand without memory");
  require_aligned(tensor.data(), call);
  if (count > tensor.GetSize())
    violate(call, "more elements (" + std::to_string(count) + ") than the tensor has (" +
                      std::to_string(tensor.GetSize()) + ")");
}

// Operands are the same tensor or lie apart.
template <class T, class U>
void require_apart(const LocalTensor<T>& to, const LocalTensor<U>& from, std::uint32_t count,
                   const char* call) {
  const auto* a = reinterpret_cast<const std::uint8_t*>(to.data());
  const auto* b = reinterpret_cast<const std::uint8_t*>(from.data());
  if (a != b && a + count * sizeof(T) > b && b + count * sizeof(U) > a)
    violate(call, "destination and source overlap in part");
}

template <class T>
ascend_sim::ascendc::Access reads(const LocalTensor<T>& tensor, std::uint32_t count) {
  return {tensor.data(), count * sizeof(T), false};
}

template <class T>
ascend_sim::ascendc::Access writes(const LocalTensor<T>& tensor, std::uint32_t count) {
  return {tensor.data(), count * sizeof(T), true};
}

template <class T, class Function>
void unary(const char* call, const LocalTensor<T>& to, const LocalTensor<T>& from, std::uint32_t count,
           Function function) {
  require_operand(to, count, call);
  require_operand(from, count, call);
  require_apart(to, from, count, call);
  core().execute(PIPE_V, call, {reads(from, count), writes(to, count)});
  for (std::uint32_t index = 0; index < count; ++index)
    to.data()[index] = static_cast<T>(function(static_cast<Wide<T>>(from.data()[index])));
}

template <class T, class Function>
void binary(const char* call, const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right,
            std::uint32_t count, Function function) {
  require_operand(to, count, call);
  require_operand(left, count, call);
  require_operand(right, count, call);
  require_apart(to, left, count, call);
  require_apart(to, right, count, call);
  core().execute(PIPE_V, call, {reads(left, count), reads(right, count), writes(to, count)});
  for (std::uint32_t index = 0; index < count; ++index)
    to.data()[index] = static_cast<T>(
        function(static_cast<Wide<T>>(left.data()[index]), static_cast<Wide<T>>(right.data()[index])));
}

template <CMPMODE mode_unused = CMPMODE::EQ>
inline bool compare(CMPMODE mode, float left, float right) {
  switch (mode) {
    case CMPMODE::LT:
      return left < right;
    case CMPMODE::GT:
      return left > right;
    case CMPMODE::EQ:
      return left == right;
    case CMPMODE::LE:
      return left <= right;
    case CMPMODE::GE:
      return left >= right;
    case CMPMODE::NE:
      return left != right;
  }
  return false;
}

// Comparisons work on whole repeats of 256 bytes.
template <class T>
void require_whole_repeats(std::uint32_t count, const char* call) {
  require(count * sizeof(T) % 256 == 0, call,
          std::to_string(count) + " elements are no whole repeats of 256 bytes");
}

}  // namespace detail

#define ASCENDC_BINARY(Name, supported, expression)                                                 \
  template <class T>                                                                                \
  void Name(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right,      \
            std::int32_t count) {                                                                   \
    static_assert(detail::supported<T>, #Name ": a type that the vector unit does not compute in"); \
    detail::binary(#Name, to, left, right, count, [](auto a, auto b) { return expression; });       \
  }
ASCENDC_BINARY(Add, is_number, a + b)
ASCENDC_BINARY(Sub, is_number, a - b)
ASCENDC_BINARY(Mul, is_number, a* b)
ASCENDC_BINARY(Div, is_float, a / b)
ASCENDC_BINARY(Max, is_number, a > b ? a : b)
ASCENDC_BINARY(Min, is_number, a < b ? a : b)
ASCENDC_BINARY(And, is_bits, a& b)
ASCENDC_BINARY(Or, is_bits, a | b)
#undef ASCENDC_BINARY

#define ASCENDC_UNARY(Name, supported, expression)                                                  \
  template <class T>                                                                                \
  void Name(const LocalTensor<T>& to, const LocalTensor<T>& from, std::int32_t count) {             \
    static_assert(detail::supported<T>, #Name ": a type that the vector unit does not compute in"); \
    detail::unary(#Name, to, from, count, [](auto a) { return expression; });                       \
  }
ASCENDC_UNARY(Exp, is_float, std::exp(a))
ASCENDC_UNARY(Ln, is_float, std::log(a))
ASCENDC_UNARY(Abs, is_float, std::fabs(a))
ASCENDC_UNARY(Sqrt, is_float, std::sqrt(a))
ASCENDC_UNARY(Rsqrt, is_float, 1.0f / std::sqrt(a))
ASCENDC_UNARY(Reciprocal, is_float, 1.0f / a)
ASCENDC_UNARY(Relu, is_float, a > 0 ? a : decltype(a)(0))
ASCENDC_UNARY(Not, is_bits, ~a)
#undef ASCENDC_UNARY

#define ASCENDC_SCALAR(Name, supported, expression)                                                      \
  template <class T>                                                                                     \
  void Name(const LocalTensor<T>& to, const LocalTensor<T>& from, const T& scalar, std::int32_t count) { \
    static_assert(detail::supported<T>, #Name ": a type that the vector unit does not compute in");      \
    const auto b = static_cast<detail::Wide<T>>(scalar);                                                 \
    detail::unary(#Name, to, from, count, [b](auto a) { return expression; });                           \
  }
ASCENDC_SCALAR(Adds, is_number, a + b)
ASCENDC_SCALAR(Muls, is_number, a* b)
ASCENDC_SCALAR(Maxs, is_number, a > b ? a : b)
ASCENDC_SCALAR(Mins, is_number, a < b ? a : b)
#undef ASCENDC_SCALAR

// to += from * scalar; the destination may be float with a half source.
template <class T, class U>
void Axpy(const LocalTensor<T>& to, const LocalTensor<U>& from, const U& scalar, std::int32_t count) {
  static_assert(detail::is_float<T> && detail::is_float<U> && sizeof(T) >= sizeof(U), "Axpy: float and half");
  detail::require_operand(to, count, "Axpy");
  detail::require_operand(from, count, "Axpy");
  core().execute(PIPE_V, "Axpy",
                 {detail::reads(from, count), detail::reads(to, count), detail::writes(to, count)});
  for (std::int32_t index = 0; index < count; ++index)
    to.data()[index] = static_cast<T>(float(to.data()[index]) + float(from.data()[index]) * float(scalar));
}

template <class T>
void Duplicate(const LocalTensor<T>& to, const T& scalar, std::int32_t count) {
  detail::require_operand(to, count, "Duplicate");
  core().execute(PIPE_V, "Duplicate", {detail::writes(to, count)});
  for (std::int32_t index = 0; index < count; ++index) to.data()[index] = scalar;
}

// first, first + step, first + 2 * step, …
template <class T>
void ArithProgression(const LocalTensor<T>& to, const T first, const T step, std::int32_t count) {
  static_assert(detail::is_number<T>, "ArithProgression: a type that the vector unit does not compute in");
  detail::require_operand(to, count, "ArithProgression");
  core().execute(PIPE_V, "ArithProgression", {detail::writes(to, count)});
  for (std::int32_t index = 0; index < count; ++index)
    to.data()[index] = static_cast<T>(first + step * static_cast<T>(index));
}

namespace detail {

template <class To, class From>
constexpr bool casts() {
  const bool widens =
      std::is_same_v<To, float> && (std::is_same_v<From, half> || std::is_same_v<From, bfloat16_t>);
  const bool narrows =
      std::is_same_v<From, float> && (std::is_same_v<To, half> || std::is_same_v<To, bfloat16_t> ||
                                      std::is_same_v<To, std::int32_t> || std::is_same_v<To, std::int64_t>);
  const bool counts = (std::is_same_v<From, std::int16_t> || std::is_same_v<From, std::int32_t> ||
                       std::is_same_v<From, std::int64_t>) &&
                      std::is_same_v<To, float>;
  const bool integers = (std::is_same_v<From, std::int32_t> && std::is_same_v<To, std::int64_t>) ||
                        (std::is_same_v<From, std::int64_t> && std::is_same_v<To, std::int32_t>);
  const bool bytes =
      (std::is_same_v<From, std::int8_t> || std::is_same_v<From, std::uint8_t>) && std::is_same_v<To, half>;
  return widens || narrows || counts || integers || bytes;
}

inline float round_to_integer(float value, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return std::floor(value);
    case RoundMode::CAST_CEIL:
      return std::ceil(value);
    case RoundMode::CAST_ROUND:
      return std::round(value);
    case RoundMode::CAST_TRUNC:
      return std::trunc(value);
    default:
      return std::nearbyint(value);
  }
}

}  // namespace detail

// Widening takes CAST_NONE; narrowing a rounding mode (CAST_NONE and CAST_RINT are to nearest even).
template <class To, class From>
void Cast(const LocalTensor<To>& to, const LocalTensor<From>& from, RoundMode mode, std::uint32_t count) {
  static_assert(detail::casts<To, From>(), "Cast: a pair of types that the vector unit does not convert");
  detail::require_operand(to, count, "Cast");
  detail::require_operand(from, count, "Cast");
  detail::require_apart(to, from, count, "Cast");
  constexpr bool widens = sizeof(To) > sizeof(From) && std::is_same_v<To, float>;
  require(!widens || mode == RoundMode::CAST_NONE, "Cast", "a conversion that loses nothing takes CAST_NONE");
  constexpr bool to_integer = std::is_same_v<From, float> && std::is_integral_v<To>;
  require(!to_integer || mode != RoundMode::CAST_NONE, "Cast", "float to integer needs a rounding mode");
  constexpr bool to_half = std::is_same_v<To, half> || std::is_same_v<To, bfloat16_t>;
  require(!to_half || mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT, "Cast",
          "this shim rounds to half and bfloat16 with CAST_NONE and CAST_RINT only");
  core().execute(PIPE_V, "Cast", {detail::reads(from, count), detail::writes(to, count)});
  for (std::uint32_t index = 0; index < count; ++index) {
    if constexpr (to_integer)
      to.data()[index] = static_cast<To>(detail::round_to_integer(from.data()[index], mode));
    else if constexpr (std::is_integral_v<To>)
      to.data()[index] = static_cast<To>(from.data()[index]);
    else
      to.data()[index] = static_cast<To>(static_cast<float>(from.data()[index]));
  }
}

// One bit for each element, low bits first.
template <class T, class U>
void CompareScalar(const LocalTensor<U>& to, const LocalTensor<T>& from, const T scalar, CMPMODE mode,
                   std::uint32_t count) {
  static_assert(detail::is_float<T> && sizeof(U) == 1, "CompareScalar: float or half into bytes of bits");
  detail::require_operand(from, count, "CompareScalar");
  detail::require_operand(to, count / 8, "CompareScalar");
  detail::require_whole_repeats<T>(count, "CompareScalar");
  core().execute(PIPE_V, "CompareScalar", {detail::reads(from, count), detail::writes(to, count / 8)});
  std::memset(to.data(), 0, count / 8);
  for (std::uint32_t index = 0; index < count; ++index)
    if (detail::compare(mode, float(from.data()[index]), float(scalar)))
      to.data()[index / 8] |= U(1u << index % 8);
}

template <class T, class U>
void Compare(const LocalTensor<U>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, CMPMODE mode,
             std::uint32_t count) {
  static_assert(detail::is_float<T> && sizeof(U) == 1, "Compare: float or half into bytes of bits");
  detail::require_operand(left, count, "Compare");
  detail::require_operand(right, count, "Compare");
  detail::require_operand(to, count / 8, "Compare");
  detail::require_whole_repeats<T>(count, "Compare");
  core().execute(PIPE_V, "Compare",
                 {detail::reads(left, count), detail::reads(right, count), detail::writes(to, count / 8)});
  std::memset(to.data(), 0, count / 8);
  for (std::uint32_t index = 0; index < count; ++index)
    if (detail::compare(mode, float(left.data()[index]), float(right.data()[index])))
      to.data()[index / 8] |= U(1u << index % 8);
}

// Where the mask's bit is set the first source, elsewhere the second.
template <class T, class U>
void Select(const LocalTensor<T>& to, const LocalTensor<U>& mask, const LocalTensor<T>& yes,
            const LocalTensor<T>& no, SELMODE mode, std::uint32_t count) {
  require(mode == SELMODE::VSEL_TENSOR_TENSOR_MODE, "Select", "two tensors need VSEL_TENSOR_TENSOR_MODE");
  detail::require_operand(to, count, "Select");
  detail::require_operand(yes, count, "Select");
  detail::require_operand(no, count, "Select");
  detail::require_operand(mask, (count + 7) / 8, "Select");
  core().execute(PIPE_V, "Select",
                 {detail::reads(mask, (count + 7) / 8), detail::reads(yes, count), detail::reads(no, count),
                  detail::writes(to, count)});
  for (std::uint32_t index = 0; index < count; ++index)
    to.data()[index] = (mask.data()[index / 8] >> index % 8 & 1) ? yes.data()[index] : no.data()[index];
}

template <class T, class U>
void Select(const LocalTensor<T>& to, const LocalTensor<U>& mask, const LocalTensor<T>& yes, T no, SELMODE mode,
            std::uint32_t count) {
  require(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE, "Select",
          "a tensor and a scalar need VSEL_TENSOR_SCALAR_MODE");
  detail::require_operand(to, count, "Select");
  detail::require_operand(yes, count, "Select");
  detail::require_operand(mask, (count + 7) / 8, "Select");
  core().execute(PIPE_V, "Select",
                 {detail::reads(mask, (count + 7) / 8), detail::reads(yes, count), detail::writes(to, count)});
  for (std::uint32_t index = 0; index < count; ++index)
    to.data()[index] = (mask.data()[index / 8] >> index % 8 & 1) ? yes.data()[index] : no;
}

namespace detail {

// The result in to[0]; `work` is overwritten.
template <class T, class Function>
void reduce(const char* call, const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<T>& work,
            std::uint32_t count, T start, Function function) {
  static_assert(is_float<T>, "reductions compute in float and half");
  require_operand(to, 1, call);
  require_operand(from, count, call);
  require_operand(work, 1, call);
  core().execute(PIPE_V, call, {reads(from, count), writes(work, 1), writes(to, 1)});
  float result = start;
  for (std::uint32_t index = 0; index < count; ++index) result = function(result, float(from.data()[index]));
  to.data()[0] = static_cast<T>(result);
}

}  // namespace detail

template <class T>
void ReduceSum(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<T>& work,
               std::int32_t count) {
  detail::reduce("ReduceSum", to, from, work, count, T(0), [](float a, float b) { return a + b; });
}

template <class T>
void ReduceMax(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<T>& work,
               std::int32_t count) {
  detail::reduce("ReduceMax", to, from, work, count, T(-std::numeric_limits<float>::infinity()),
                 [](float a, float b) { return a > b ? a : b; });
}

template <class T>
void ReduceMin(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<T>& work,
               std::int32_t count) {
  detail::reduce("ReduceMin", to, from, work, count, T(std::numeric_limits<float>::infinity()),
                 [](float a, float b) { return a < b ? a : b; });
}

// Strides of a source in its repeats, in blocks, and of the pattern, in repeats.
struct GatherMaskParams {
  GatherMaskParams(std::uint8_t src0_block, std::uint16_t repeats, std::uint16_t src0_repeat,
                   std::uint8_t src1_repeat)
      : src0BlockStride(src0_block),
        repeatTimes(repeats),
        src0RepeatStride(src0_repeat),
        src1RepeatStride(src1_repeat) {}
  std::uint8_t src0BlockStride;
  std::uint16_t repeatTimes, src0RepeatStride;
  std::uint8_t src1RepeatStride;
};

// The elements whose bit of the pattern is set, one after another; `kept`: their number. The rest of the last
// block that has one of them is undefined.
template <class T, class U>
void GatherMask(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<U>& pattern,
                const bool reduceMode, const std::uint32_t mask, const GatherMaskParams& params,
                std::uint64_t& kept) {
  static_assert(sizeof(T) == sizeof(U) && (sizeof(T) == 2 || sizeof(T) == 4) && std::is_unsigned_v<U>,
                "GatherMask: a pattern of unsigned integers as wide as the elements");
  constexpr const char* call = "GatherMask";
  require(reduceMode && params.repeatTimes == 1, call, "this shim knows a single repeat of any length only");
  detail::require_operand(from, mask, call);
  detail::require_operand(pattern, (mask + sizeof(U) * 8 - 1) / (sizeof(U) * 8), call);
  detail::require_apart(to, from, mask, call);
  const auto is_kept = [&](std::uint32_t index) {
    return pattern.data()[index / (sizeof(U) * 8)] >> index % (sizeof(U) * 8) & 1;
  };
  std::uint32_t count = 0;
  for (std::uint32_t index = 0; index < mask; ++index) count += is_kept(index);
  constexpr std::uint32_t unit = ascend_sim::ascendc::kBlockBytes / sizeof(T);
  const std::uint32_t stored = (count + unit - 1) / unit * unit;
  if (stored > 0) detail::require_operand(to, stored, call);
  core().execute(
      PIPE_V, call,
      {detail::reads(from, mask), detail::reads(pattern, (mask + sizeof(U) * 8 - 1) / (sizeof(U) * 8)),
       detail::writes(to, stored)});
  std::uint32_t place = 0;
  for (std::uint32_t index = 0; index < mask; ++index)
    if (is_kept(index)) to.data()[place++] = from.data()[index];
  for (; place < stored; ++place) std::memset(to.data() + place, 0x7B, sizeof(T));
  kept = count;
}

// to[i] = from[offsets[i] bytes + base bytes]
template <class T>
void Gather(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<std::uint32_t>& offsets,
            std::uint32_t base, std::uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather: elements of two or four bytes");
  detail::require_operand(to, count, "Gather");
  detail::require_operand(offsets, count, "Gather");
  core().execute(
      PIPE_V, "Gather",
      {detail::reads(from, from.GetSize()), detail::reads(offsets, count), detail::writes(to, count)});
  for (std::uint32_t index = 0; index < count; ++index) {
    const std::uint64_t at = std::uint64_t{offsets.data()[index]} + base;
    require(at % sizeof(T) == 0 && at / sizeof(T) < from.GetSize(), "Gather",
            "an offset outside of the source");
    to.data()[index] = from.data()[at / sizeof(T)];
  }
}

}  // namespace AscendC

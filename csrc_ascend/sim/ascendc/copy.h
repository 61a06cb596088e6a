// Copies between global memory and the unified buffer: DataCopy in whole 32-byte blocks, DataCopyPad in bytes.
#pragma once

#include "queue.h"

namespace AscendC {

// blockCount segments of blockLen; the gaps between them in source and destination. Lengths and gaps of the
// unified buffer are in 32-byte blocks; of global memory too for DataCopyParams, in bytes for
// DataCopyExtParams.
struct DataCopyParams {
  std::uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;
};

struct DataCopyExtParams {
  std::uint16_t blockCount = 1;
  std::uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};

// Padding of a segment to whole blocks: elements of paddingValue in front and behind, at most 32 bytes each;
// without isPad the padding behind is undefined.
template <class T>
struct DataCopyPadExtParams {
  bool isPad = false;
  std::uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue{};
};

namespace detail {

constexpr std::uint64_t kUnit = ascend_sim::ascendc::kBlockBytes;

inline void require_aligned(const void* pointer, const char* call) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % kUnit != 0)
    violate(call, "the unified buffer's address is not a multiple of 32 bytes");
}

template <class T>
void require_whole_blocks(std::uint32_t count, const char* call) {
  require(count > 0 && count * sizeof(T) % kUnit == 0, call,
          std::to_string(count * sizeof(T)) + " bytes are no whole 32-byte blocks: DataCopyPad copies parts");
}

inline void copy(pipe_t pipe, const char* call, void* to, const void* from, std::size_t bytes) {
  core().execute(pipe, call, {{from, bytes, false}, {to, bytes, true}});
  std::memcpy(to, from, bytes);
}

// To global memory: adds where SetAtomicAdd says so.
template <class T>
void store(const char* call, T* to, const T* from, std::size_t bytes) {
  core().execute(PIPE_MTE3, call, {{from, bytes, false}, {to, bytes, true}});
  if (!core().is_summing) {
    std::memcpy(to, from, bytes);
    return;
  }
  if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, half>) {
    for (std::size_t index = 0; index < bytes / sizeof(T); ++index)
      to[index] = static_cast<T>(to[index] + from[index]);
  } else {
    violate(call, "atomic addition of a type that it does not know");
  }
}

}  // namespace detail

template <class T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyParams& params) {
  detail::require_aligned(to.data(), "DataCopy");
  require(params.blockLen > 0 && params.blockCount > 0, "DataCopy",
          "nothing to copy: blockLen or blockCount is 0");
  const std::size_t bytes = params.blockLen * detail::kUnit;
  auto* target = reinterpret_cast<std::uint8_t*>(to.data());
  const auto* source = reinterpret_cast<const std::uint8_t*>(from.data());
  for (int segment = 0; segment < params.blockCount; ++segment) {
    detail::copy(PIPE_MTE2, "DataCopy", target, source, bytes);
    target += bytes + params.dstStride * detail::kUnit;
    source += bytes + params.srcStride * detail::kUnit;
  }
}

template <class T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, std::uint32_t count) {
  detail::require_whole_blocks<T>(count, "DataCopy");
  detail::require_aligned(to.data(), "DataCopy");
  require(count <= to.GetSize(), "DataCopy", "more than the tensor holds");
  detail::copy(PIPE_MTE2, "DataCopy", to.data(), from.data(), count * sizeof(T));
}

template <class T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, std::uint32_t count) {
  detail::require_whole_blocks<T>(count, "DataCopy");
  detail::require_aligned(from.data(), "DataCopy");
  require(count <= from.GetSize(), "DataCopy", "more than the tensor holds");
  detail::store(("DataCopy"), to.data(), from.data(), count * sizeof(T));
}

// Within the unified buffer; the vector unit does it.
template <class T>
void DataCopy(const LocalTensor<T>& to, const LocalTensor<T>& from, std::uint32_t count) {
  detail::require_whole_blocks<T>(count, "DataCopy");
  detail::require_aligned(to.data(), "DataCopy");
  detail::require_aligned(from.data(), "DataCopy");
  require(count <= to.GetSize() && count <= from.GetSize(), "DataCopy", "more than the tensor holds");
  detail::copy(PIPE_V, "DataCopy", to.data(), from.data(), count * sizeof(T));
}

// Each segment begins a new block in the unified buffer.
template <class T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad) {
  constexpr const char* call = "DataCopyPad";
  detail::require_aligned(to.data(), call);
  require(params.blockLen > 0 && params.blockCount > 0, call, "nothing to copy: blockLen or blockCount is 0");
  require(params.blockLen % sizeof(T) == 0, call, "blockLen is in bytes, and no whole number of elements");
  const std::size_t left = pad.leftPadding * sizeof(T), right = pad.rightPadding * sizeof(T);
  require(left <= detail::kUnit && right <= detail::kUnit, call, "more than 32 bytes of padding");
  auto* target = reinterpret_cast<std::uint8_t*>(to.data());
  const auto* source = reinterpret_cast<const std::uint8_t*>(from.data());
  const std::size_t filled = left + params.blockLen + right;
  const std::size_t whole = (filled + detail::kUnit - 1) / detail::kUnit * detail::kUnit;
  for (int segment = 0; segment < params.blockCount; ++segment) {
    require(target + filled <= reinterpret_cast<std::uint8_t*>(to.data() + to.GetSize()), call,
            "more than the tensor holds");
    core().execute(PIPE_MTE2, call,
                   {{source, params.blockLen, false}, {target, pad.isPad ? whole : filled, true}});
    std::memcpy(target + left, source, params.blockLen);
    if (pad.isPad) {
      for (std::size_t index = 0; index < pad.leftPadding; ++index)
        reinterpret_cast<T*>(target)[index] = pad.paddingValue;
      for (auto at = left + params.blockLen; at < whole; at += sizeof(T))
        *reinterpret_cast<T*>(target + at) = pad.paddingValue;
    }
    target += whole + params.dstStride * detail::kUnit;
    source += params.blockLen + params.srcStride;
  }
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyExtParams& params) {
  constexpr const char* call = "DataCopyPad";
  detail::require_aligned(from.data(), call);
  require(params.blockLen > 0 && params.blockCount > 0, call, "nothing to copy: blockLen or blockCount is 0");
  require(params.blockLen % sizeof(T) == 0, call, "blockLen is in bytes, and no whole number of elements");
  auto* target = reinterpret_cast<std::uint8_t*>(to.data());
  const auto* source = reinterpret_cast<const std::uint8_t*>(from.data());
  const std::size_t whole = (params.blockLen + detail::kUnit - 1) / detail::kUnit * detail::kUnit;
  for (int segment = 0; segment < params.blockCount; ++segment) {
    detail::store(call, reinterpret_cast<T*>(target), reinterpret_cast<const T*>(source), params.blockLen);
    target += params.blockLen + params.dstStride;
    source += whole + params.srcStride * detail::kUnit;
  }
}

// Makes subsequent copies to global memory atomic additions.
template <class T>
void SetAtomicAdd() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, std::int32_t>,
                "atomic addition knows float, half and int32");
  core().is_summing = true;
}

inline void SetAtomicNone() { core().is_summing = false; }

}  // namespace AscendC

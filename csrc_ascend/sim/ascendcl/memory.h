// Device memory as address ranges: each device has a large range of addresses, and freed addresses are not
// reused until the range is exhausted, so that stale pointers are detected.
#pragma once

#include <cstddef>
#include <cstdint>

#include "state.h"

namespace ascend_sim {

// What an address belongs to.
struct Range {
  std::uintptr_t begin;
  std::size_t bytes;
  int device;
};

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = 2u << 20;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// All of these take the memory lock themselves; none may be called with the state's lock held.

// Whose addresses are reserved ones, behind which memory of any device may be mapped.
constexpr int kNoDevice = -1;

// Addresses without memory behind them. RuntimeError if there are none left.
void* reserve_addresses(int device, std::size_t bytes);
void release_addresses(void* begin);

// Subtracts bytes from a device's free memory, or throws ACL_ERROR_RT_MEMORY_ALLOCATION.
void charge(int device, std::size_t bytes, const char* what);
void refund(int device, std::size_t bytes);

// Registers a range as device memory, or removes it.
void add_live(void* begin, std::size_t bytes, int device);
Range remove_live(const void* begin, const char* what);

// Whether the address lies in any device's range of addresses, live or not.
bool in_arena(const void* pointer);
// Whether all of the host range came from aclrtMallocHost or was registered.
bool is_pinned(const void* pointer, std::size_t bytes);

}  // namespace ascend_sim

// Device memory, its accounts, host memory, and copies between them.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "card_account.h"

namespace ascend_sim {
namespace {

constexpr std::size_t kArena = std::size_t{4} << 40;
// New memory is a repeated private mapping of this much poison, which takes no memory until it is written.
constexpr std::size_t kPoisonFile = std::size_t{16} << 20;

struct Arena {
  std::uintptr_t begin;
  std::uintptr_t cursor;
  std::map<std::uintptr_t, std::size_t> taken;
  std::size_t used = 0;
  std::size_t peak = 0;
};

std::mutex g_memory;
std::map<int, Arena> g_arenas;
std::map<std::uintptr_t, Range> g_live;
std::map<std::uintptr_t, std::size_t> g_pinned;

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

[[noreturn]] void fail(const char* what) {
  throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR, std::string(what) + ": " + std::strerror(errno));
}

int poison_file() {
  static const int file = [] {
    int made = memfd_create("ascend-sim-poison", MFD_CLOEXEC);
    if (made < 0 || ftruncate(made, kPoisonFile) != 0) fail("memfd_create");
    void* page = mmap(nullptr, kPoisonFile, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    if (page == MAP_FAILED) fail("mmap");
    poison(page, kPoisonFile);
    munmap(page, kPoisonFile);
    return made;
  }();
  return file;
}

Arena& arena(int device) {
  auto found = g_arenas.find(device);
  if (found != g_arenas.end()) return found->second;
  void* begin = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) fail("mmap");
  std::uintptr_t first = round_up(address(begin), kHugePage);
  return g_arenas[device] = Arena{first, first, {}};
}

std::size_t free_bytes(const Arena& from, const CardUse& card) {
  return options().memory - std::min(options().memory, from.used + card.by_others());
}

// The first free range at or after the cursor, which only advances and wraps around at the end.
std::uintptr_t find_place(Arena& from, std::size_t bytes) {
  const std::uintptr_t end = from.begin + kArena - kHugePage;
  for (int round = 0; round < 2; ++round) {
    std::uintptr_t at = from.cursor;
    auto next = from.taken.lower_bound(at);
    while (next != from.taken.end() && next->first < at + bytes) {
      at = round_up(next->first + next->second, kHugePage);
      ++next;
    }
    if (at + bytes <= end) return at;
    from.cursor = from.begin;
  }
  throw RuntimeError(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device's addresses are used up");
}

// The live range that holds the address, or null. Under the memory lock.
const Range* find_live(std::uintptr_t at) {
  auto next = g_live.upper_bound(at);
  if (next == g_live.begin()) return nullptr;
  const Range& range = std::prev(next)->second;
  return at - range.begin < range.bytes ? &range : nullptr;
}

void commit_poison(void* begin, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; done += kPoisonFile) {
    std::size_t part = std::min(kPoisonFile, bytes - done);
    if (mmap(static_cast<char*>(begin) + done, part, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison_file(), 0) == MAP_FAILED)
      fail("mmap");
  }
}

}  // namespace

void* reserve_addresses(int device, std::size_t bytes) {
  Lock lock(g_memory);
  Arena& from = arena(device);
  std::uintptr_t at = find_place(from, bytes);
  from.taken[at] = bytes;
  from.cursor = round_up(at + bytes, kHugePage);
  return reinterpret_cast<void*>(at);
}

void release_addresses(void* begin) {
  Lock lock(g_memory);
  for (auto& item : g_arenas) {
    auto found = item.second.taken.find(address(begin));
    if (found == item.second.taken.end()) continue;
    // unmapped, so that any access faults
    if (mmap(begin, round_up(found->second, kPage), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
      fail("mmap");
    item.second.taken.erase(found);
    return;
  }
  throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "these addresses are not reserved");
}

void charge(int device, std::size_t bytes, const char* what) {
  Lock lock(g_memory);
  Arena& from = arena(device);
  CardUse card(device);
  const std::size_t left = free_bytes(from, card);
  if (bytes > left)
    throw RuntimeError(ACL_ERROR_RT_MEMORY_ALLOCATION, std::string(what) + " of " + std::to_string(bytes) +
                                                           " bytes on device " + std::to_string(device) +
                                                           ", which has " + std::to_string(left) + " of " +
                                                           std::to_string(options().memory) + " left");
  from.used += bytes;
  from.peak = std::max(from.peak, from.used);
  card.set_own(from.used);
}

void refund(int device, std::size_t bytes) {
  Lock lock(g_memory);
  Arena& from = arena(device);
  from.used -= bytes;
  CardUse(device).set_own(from.used);
}

void add_live(void* begin, std::size_t bytes, int device) {
  Lock lock(g_memory);
  g_live[address(begin)] = Range{address(begin), bytes, device};
}

Range remove_live(const void* begin, const char* what) {
  Lock lock(g_memory);
  auto found = g_live.find(address(begin));
  if (found == g_live.end()) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, std::string("this is no ") + what);
  Range range = found->second;
  g_live.erase(found);
  return range;
}

bool on_device(const void* pointer, std::size_t bytes) {
  Lock lock(g_memory);
  // a tensor may span several physical allocations that are mapped contiguously
  std::uintptr_t at = address(pointer);
  const std::uintptr_t end = at + bytes;
  do {
    const Range* range = find_live(at);
    if (range == nullptr) return false;
    at = range->begin + range->bytes;
  } while (at < end);
  return true;
}

int device_of(const void* pointer) {
  Lock lock(g_memory);
  const Range* range = find_live(address(pointer));
  return range == nullptr ? -1 : range->device;
}

bool in_arena(const void* pointer) {
  Lock lock(g_memory);
  return std::any_of(g_arenas.begin(), g_arenas.end(),
                     [&](const auto& item) { return address(pointer) - item.second.begin < kArena; });
}

bool is_pinned(const void* pointer, std::size_t bytes) {
  Lock lock(g_memory);
  auto next = g_pinned.upper_bound(address(pointer));
  if (next == g_pinned.begin()) return false;
  auto found = std::prev(next);
  return address(pointer) + bytes <= found->first + found->second;
}

namespace {

// Sides of a copy: both at once where the kind leaves it open.
struct Sides {
  bool to_device;
  bool from_device;
};

void check_side(const void* pointer, std::size_t bytes, bool device, const char* side) {
  bool here = on_device(pointer, bytes);
  if (device && !here)
    throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID,
                       std::string("the ") + side + " is not device memory of " + std::to_string(bytes) +
                           " bytes" + (in_arena(pointer) ? " (freed, or too small)" : " (it is host memory)"));
  if (!device && in_arena(pointer))
    throw RuntimeError(
        ACL_ERROR_RT_PARAM_INVALID,
        std::string("the ") + side + " is device memory where the kind of copy says host memory");
}

Sides sides_of(aclrtMemcpyKind kind, const void* to, const void* from) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return {false, false};
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
      return {true, false};
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return {false, true};
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
      return {true, true};
    case ACL_MEMCPY_DEFAULT:
      return {in_arena(to), in_arena(from)};
  }
  throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "unknown kind of copy " + std::to_string(kind));
}

Sides check_copy(const void* to, std::size_t room, const void* from, std::size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room)
    throw RuntimeError(
        ACL_ERROR_RT_PARAM_INVALID,
        std::to_string(bytes) + " bytes do not fit into the destination's " + std::to_string(room));
  Sides sides = sides_of(kind, to, from);
  if (bytes == 0) return sides;
  if (to == nullptr || from == nullptr)
    throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "a side of the copy is null");
  check_side(to, bytes, sides.to_device, "destination");
  check_side(from, bytes, sides.from_device, "source");
  return sides;
}

void check_device_range(const void* pointer, std::size_t room, std::size_t bytes) {
  if (bytes > room) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "more bytes than the memory has");
  if (bytes != 0) check_side(pointer, bytes, true, "destination");
}

aclError allocate(const char* call, void** pointer, std::size_t bytes) {
  return reporting(call, [&] {
    int device = require_device();
    if (bytes == 0) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "an allocation of no bytes");
    std::size_t whole = round_up(bytes, kPage);
    charge(device, whole, "an allocation");
    void* begin = reserve_addresses(device, whole);
    commit_poison(begin, whole);
    add_live(begin, bytes, device);
    *pointer = begin;
  });
}

aclError allocate_host(const char* call, void** pointer, std::size_t bytes) {
  return reporting(call, [&] {
    require_device();
    if (bytes == 0) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "an allocation of no bytes");
    void* begin = std::aligned_alloc(kPage, round_up(bytes, kPage));
    if (begin == nullptr) throw RuntimeError(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no memory left");
    poison(begin, bytes);
    Lock lock(g_memory);
    g_pinned[address(begin)] = bytes;
    *pointer = begin;
  });
}

}  // namespace
}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return allocate("aclrtMalloc", pointer, bytes);
}
aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return allocate("aclrtMallocAlign32", pointer, bytes);
}
aclError aclrtMallocWithCfg(void** pointer, size_t bytes, aclrtMemMallocPolicy, aclrtMallocConfig*) {
  return allocate("aclrtMallocWithCfg", pointer, bytes);
}

aclError aclrtFree(void* pointer) {
  return reporting("aclrtFree", [&] {
    Range range = remove_live(pointer, "live allocation of aclrtMalloc");
    release_addresses(pointer);
    refund(range.device, round_up(range.bytes, kPage));
  });
}

aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return allocate_host("aclrtMallocHost", pointer, bytes);
}
aclError aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, aclrtMallocConfig*) {
  return allocate_host("aclrtMallocHostWithCfg", pointer, bytes);
}

aclError aclrtFreeHost(void* pointer) {
  return reporting("aclrtFreeHost", [&] {
    Lock lock(g_memory);
    if (g_pinned.erase(address(pointer)) == 0)
      throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "this is no live allocation of aclrtMallocHost");
    std::free(pointer);
  });
}

aclError aclrtHostRegisterV2(void* pointer, uint64_t bytes, uint32_t) {
  return reporting("aclrtHostRegisterV2", [&] {
    if (pointer == nullptr || bytes == 0 || in_arena(pointer))
      throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "only host memory can be registered");
    Lock lock(g_memory);
    if (!g_pinned.emplace(address(pointer), bytes).second)
      throw RuntimeError(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "the memory is registered already");
  });
}
aclError aclrtHostRegister(void* pointer, uint64_t bytes, aclrtHostRegisterType, void** device_pointer) {
  *device_pointer = pointer;
  return aclrtHostRegisterV2(pointer, bytes, 0);
}
aclError aclrtHostUnregister(void* pointer) {
  return reporting("aclrtHostUnregister", [&] {
    Lock lock(g_memory);
    if (g_pinned.erase(address(pointer)) == 0)
      throw RuntimeError(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "the memory is not registered");
  });
}

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  int device = device_of(pointer);
  if (device >= 0) {
    attributes->location = {static_cast<uint32_t>(device), ACL_MEM_LOCATION_TYPE_DEVICE};
  } else {
    attributes->location.type =
        is_pinned(pointer, 1) ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  }
  attributes->pageSize = kPage;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* available, size_t* total) {
  return reporting("aclrtGetMemInfo", [&] {
    int device = require_device();
    Lock lock(g_memory);
    *total = options().memory;
    *available = free_bytes(arena(device), CardUse(device));
  });
}

aclError aclrtGetMemUsageInfo(int32_t device, aclrtMemUsageInfo* usage, size_t room, size_t* count) {
  return reporting("aclrtGetMemUsageInfo", [&] {
    check_device(device);
    *count = std::min<size_t>(room, 1);
    if (room == 0) return;
    Lock lock(g_memory);
    std::memset(usage, 0, sizeof *usage);
    std::strcpy(usage->name, "APP");
    usage->curMemSize = arena(device).used;
    usage->memPeakSize = arena(device).peak;
  });
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  return reporting("aclrtMemcpy", [&] {
    require_device();
    refuse_while_capturing("aclrtMemcpy");
    check_copy(to, room, from, bytes, kind);
    std::memmove(to, from, bytes);
  });
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return reporting("aclrtMemcpyAsync", [&] {
    Sides sides = check_copy(to, room, from, bytes, kind);
    bool pageable =
        (!sides.to_device && !is_pinned(to, bytes)) || (!sides.from_device && !is_pinned(from, bytes));
    // such a copy is staged and synchronous, so it cannot be captured, nor run in any thread during a capture
    if (pageable && bytes != 0) {
      if (is_capturing(stream))
        throw RuntimeError(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC,
                           "a copy inside a graph needs host memory from aclrtMallocHost (pinned memory)");
      refuse_while_capturing("aclrtMemcpyAsync with pageable host memory");
    }
    submit(stream, "aclrtMemcpyAsync", [=] { std::memmove(to, from, bytes); });
  });
}

aclError aclrtMemcpyBatch(void** to, size_t* room, void** from, size_t* bytes, size_t count,
                          aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failed) {
  for (size_t i = 0; i < count; ++i) {
    aclError error = aclrtMemcpy(to[i], room[i], from[i], bytes[i], ACL_MEMCPY_DEFAULT);
    if (error != ACL_SUCCESS) {
      *failed = i;
      return error;
    }
  }
  return ACL_SUCCESS;
}

aclError aclrtMemcpyBatchAsync(void** to, size_t* room, void** from, size_t* bytes, size_t count,
                               aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failed, aclrtStream stream) {
  for (size_t i = 0; i < count; ++i) {
    aclError error = aclrtMemcpyAsync(to[i], room[i], from[i], bytes[i], ACL_MEMCPY_DEFAULT, stream);
    if (error != ACL_SUCCESS) {
      *failed = i;
      return error;
    }
  }
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  return reporting("aclrtMemset", [&] {
    refuse_while_capturing("aclrtMemset");
    check_device_range(to, room, bytes);
    std::memset(to, value, bytes);
  });
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  return reporting("aclrtMemsetAsync", [&] {
    check_device_range(to, room, bytes);
    submit(stream, "aclrtMemsetAsync", [=] { std::memset(to, value, bytes); });
  });
}

// A cache hint: only checks the range, and adds a node to a graph.
aclError aclrtCmoAsync(void* from, size_t bytes, aclrtCmoType, aclrtStream stream) {
  return reporting("aclrtCmoAsync", [&] {
    check_side(from, bytes, true, "range");
    submit(stream, "aclrtCmoAsync", [] {});
  });
}
}

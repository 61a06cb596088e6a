// Virtual memory management: reserved addresses, physical memory, and mappings. Used by expandable segments and
// by allocators that release memory while a model sleeps.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "memory.h"

namespace ascend_sim {
namespace {

struct Physical {
  int file;
  std::size_t bytes;
  int device;
  void* mapped_at = nullptr;
};

struct Reservation {
  std::size_t bytes;
  std::map<char*, Physical*> mapped;
};

Registry<Physical> g_physical("handle of physical memory", ACL_ERROR_RT_INVALID_HANDLE);
std::map<char*, Reservation> g_reservations;

// The reservation that holds the range. Under the lock.
Reservation& reservation_of(char* begin, std::size_t bytes) {
  auto next = g_reservations.upper_bound(begin);
  if (next != g_reservations.begin()) {
    auto& [first, found] = *std::prev(next);
    if (begin + bytes <= first + found.bytes) return found;
  }
  throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "the addresses are not reserved (aclrtReserveMemAddress)");
}

void check_free(const Reservation& reservation, char* begin, std::size_t bytes) {
  for (const auto& [at, physical] : reservation.mapped)
    if (begin < at + physical->bytes && at < begin + bytes)
      throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "something is mapped at these addresses already");
}

void check_granularity(std::size_t bytes) {
  if (bytes == 0 || bytes % kHugePage != 0)
    throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID,
                       std::to_string(bytes) + " bytes are not a multiple of the granularity of 2 MiB");
}

int poisoned_file(std::size_t bytes) {
  int file = memfd_create("ascend-sim-physical", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0)
    throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR, std::string("memfd_create: ") + std::strerror(errno));
  void* content = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (content == MAP_FAILED) {
    close(file);
    throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR, std::string("mmap: ") + std::strerror(errno));
  }
  poison(content, bytes);
  munmap(content, bytes);
  return file;
}

}  // namespace
}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions,
                                          size_t* granularity) {
  *granularity = kHugePage;
  return ACL_SUCCESS;
}

aclError aclrtReserveMemAddress(void** pointer, size_t bytes, size_t, void*, uint64_t) {
  return reporting("aclrtReserveMemAddress", [&] {
    // needs no device, and no size of memory's pages: torch_npu tries it with 512 bytes before it sets a device
    if (bytes == 0) throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "a reservation of no bytes");
    *pointer = reserve_addresses(kNoDevice, bytes);
    Lock lock(g_mutex);
    g_reservations[static_cast<char*>(*pointer)] = Reservation{bytes, {}};
  });
}

aclError aclrtReleaseMemAddress(void* pointer) {
  return reporting("aclrtReleaseMemAddress", [&] {
    {
      Lock lock(g_mutex);
      auto found = g_reservations.find(static_cast<char*>(pointer));
      if (found == g_reservations.end())
        throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "these addresses are not reserved");
      if (!found->second.mapped.empty())
        throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "memory is still mapped at these addresses");
      g_reservations.erase(found);
    }
    release_addresses(pointer);
  });
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                             uint64_t) {
  return reporting("aclrtMallocPhysical", [&] {
    check_granularity(bytes);
    if (properties->location.type != ACL_MEM_LOCATION_TYPE_DEVICE)
      throw RuntimeError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "physical memory is simulated on devices only");
    int device = static_cast<int>(properties->location.id);
    check_device(device);
    charge(device, bytes, "physical memory");
    int file = -1;
    try {
      file = poisoned_file(bytes);
    } catch (...) {
      refund(device, bytes);
      throw;
    }
    Lock lock(g_mutex);
    *handle = g_physical.add(std::make_unique<Physical>(Physical{file, bytes, device}));
  });
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  return reporting("aclrtFreePhysical", [&] {
    std::unique_ptr<Physical> physical;
    {
      Lock lock(g_mutex);
      if (g_physical.get(handle)->mapped_at != nullptr)
        throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "the memory is still mapped (aclrtUnmapMem)");
      physical = g_physical.remove(handle);
    }
    close(physical->file);
    refund(physical->device, physical->bytes);
  });
}

aclError aclrtMapMem(void* pointer, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  return reporting("aclrtMapMem", [&] {
    char* begin = static_cast<char*>(pointer);
    int device = -1;
    {
      Lock lock(g_mutex);
      Physical* physical = g_physical.get(handle);
      if (offset != 0 || bytes != physical->bytes)
        throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID,
                           "physical memory is mapped whole: offset 0 and its own size");
      if (physical->mapped_at != nullptr)
        throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "the physical memory is mapped already");
      Reservation& reservation = reservation_of(begin, bytes);
      check_free(reservation, begin, bytes);
      if (mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED)
        throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR, std::string("mmap: ") + std::strerror(errno));
      physical->mapped_at = begin;
      reservation.mapped[begin] = physical;
      device = physical->device;
    }
    add_live(begin, bytes, device);
  });
}

aclError aclrtUnmapMem(void* pointer) {
  return reporting("aclrtUnmapMem", [&] {
    char* begin = static_cast<char*>(pointer);
    {
      Lock lock(g_mutex);
      Reservation& reservation = reservation_of(begin, 1);
      auto found = reservation.mapped.find(begin);
      if (found == reservation.mapped.end())
        throw RuntimeError(ACL_ERROR_RT_PARAM_INVALID, "nothing is mapped at this address");
      if (mmap(begin, found->second->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
               -1, 0) == MAP_FAILED)
        throw RuntimeError(ACL_ERROR_RT_INTERNAL_ERROR, std::string("mmap: ") + std::strerror(errno));
      found->second->mapped_at = nullptr;
      reservation.mapped.erase(found);
    }
    remove_live(begin, "mapped memory");
  });
}
}

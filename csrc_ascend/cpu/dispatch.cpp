// Chooses the instruction sets of the CPU kernels; Python reaches it through ctypes (ops/native.py).
#include "cpu/dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <atomic>
#include <cstring>
#include <string>

namespace ascend_vllm {
namespace {

#define ASCEND_VLLM_ISA_NAME_(isa, ...) #isa,
constexpr const char* kNames[kNumIsas] = {ASCEND_VLLM_FOR_EACH_ISA(ASCEND_VLLM_ISA_NAME_)};
#undef ASCEND_VLLM_ISA_NAME_

#if defined(__x86_64__)
// Requests the AMX tile state from Linux, ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA
// (Documentation/arch/x86/xstate.rst), for all threads and forked children of the process.
bool may_use_tiles() {
  static const bool is_granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return is_granted;
}

// By CPUID, since compilers differ in the names that __builtin_cpu_supports accepts.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE and AMX-INT8
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kNeeded) == kNeeded;
}
#endif

bool machine_has(int isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
  switch (isa) {
    case k_avx2:
      return avx2;
    case k_avx512:
      return avx512;
    case k_avx512_vnni:
      return avx512_vnni;
    case k_avx512_bf16:
      return avx512_bf16;
    case k_amx_bf16:
      return avx512_bf16 && has_tiles() && may_use_tiles();
    default:
      return true;
  }
#elif defined(__aarch64__)
  // Documentation/arch/arm64/elf_hwcaps.rst; every processor has ASIMD (NEON)
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  constexpr unsigned long kSecond = HWCAP2_BF16 | HWCAP2_I8MM;
  const bool dotprod = (first & HWCAP_ASIMDDP) != 0;
  switch (isa) {
    case k_neon_dotprod:
      return dotprod;
    case k_neon_bf16:
      return dotprod && (second & kSecond) == kSecond;
    default:
      return true;
  }
#else
  return isa == k_scalar;
#endif
}

Isa best_isa() {
  int isa = kNumIsas - 1;
  while (!machine_has(isa)) --isa;
  return static_cast<Isa>(isa);
}

// 1 + Isa of each choice; 0: not yet known
std::atomic<int> active[kNumChoices];

}  // namespace

Isa active_isa(int choice) {
  int isa = active[choice].load(std::memory_order_relaxed) - 1;
  if (isa < 0) {
    isa = best_isa();
    active[choice].store(1 + isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

}  // namespace ascend_vllm

#define ASCEND_VLLM_API extern "C" __attribute__((visibility("default")))

// Comma-separated names of the sets that this machine can run, best first.
ASCEND_VLLM_API const char* ascend_vllm_cpu_isas() {
  static const std::string names = [] {
    std::string joined;
    for (int isa = ascend_vllm::kNumIsas - 1; isa >= 0; --isa) {
      if (!ascend_vllm::machine_has(isa)) continue;
      if (!joined.empty()) joined += ',';
      joined += ascend_vllm::kNames[isa];
    }
    return joined;
  }();
  return names.c_str();
}

// Of a choice, an index as choice_of() makes it.
ASCEND_VLLM_API const char* ascend_vllm_cpu_isa(int choice) {
  return ascend_vllm::kNames[ascend_vllm::active_isa(choice)];
}

// Sets a choice, or all if it is negative. 0, or -1 if the name is unknown or the machine lacks the set (then
// nothing changes).
ASCEND_VLLM_API int ascend_vllm_set_cpu_isa(int choice, const char* name) {
  for (int isa = 0; isa < ascend_vllm::kNumIsas; ++isa) {
    if (std::strcmp(name, ascend_vllm::kNames[isa]) != 0 || !ascend_vllm::machine_has(isa)) continue;
    for (int each = 0; each < ascend_vllm::kNumChoices; ++each) {
      if (choice < 0 || choice == each) {
        ascend_vllm::active[each].store(1 + isa, std::memory_order_relaxed);
      }
    }
    return 0;
  }
  return -1;
}

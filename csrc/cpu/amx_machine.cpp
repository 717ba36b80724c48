#include "amx_machine.h"

#if defined(MOEQ_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#endif

namespace moeq::cpu {
namespace {

#if defined(MOEQ_AMX) && defined(__linux__)

// All of these bits of CPUID leaf 7, EDX.
bool processor_has(unsigned bits) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & bits) == bits;
}

constexpr unsigned kBf16 = 1u << 22, kHalf = 1u << 23, kTile = 1u << 24, kInt8 = 1u << 25;
bool processor_has_amx() { return processor_has(kBf16 | kHalf | kTile); }
bool processor_has_int8() { return processor_has(kInt8); }

// XCR0 says which registers the operating system saves.
bool system_saves_tiles() {
  constexpr unsigned kOsxsave = 1u << 27, kTiles = 3u << 17;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsxsave) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTiles) == kTiles;
}

std::string refusal() {
  if (!processor_has_amx()) return "the processor has no AMX-BF16";
  if (!system_saves_tiles()) return "the operating system does not save the tile registers of AMX";
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string("the operating system refused the tile registers of AMX: ") + std::strerror(errno);
}

#elif defined(MOEQ_AMX)

bool processor_has_int8() { return false; }
std::string refusal() { return "tile registers are asked for on Linux alone"; }

#else

bool processor_has_int8() { return false; }
std::string refusal() { return "it was not compiled"; }

#endif

}  // namespace

const std::string& amx_refusal() {
  static const std::string reason = refusal();
  return reason;
}

bool amx_has_int8() { return processor_has_int8(); }

}  // namespace moeq::cpu

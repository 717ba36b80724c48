#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "amx_machine.h"

namespace moeq::cpu {
namespace {

struct Candidate {
  const char* name;
  const IsaTable& (*table)();
  std::string (*refusal)();  // why the machine cannot run it, or empty
  bool automatic;            // taken without being asked for
};

std::string no_refusal() { return ""; }

#ifdef MOEQ_X86
std::string refused(bool supported) { return supported ? "" : "the processor has no such instructions"; }

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif

#ifdef MOEQ_AMX
constexpr auto kAmxTable = amx_table;
std::string refused_amx() { return has_avx512bf16() ? amx_refusal() : "the processor has no AVX-512 BF16"; }
#else
constexpr auto kAmxTable = portable_table;  // never taken: refused
std::string refused_amx() { return amx_refusal(); }
#endif

// The best one first.
const Candidate kCandidates[] = {
    {"amx", kAmxTable, refused_amx, true},
#ifdef MOEQ_X86
    {"avx512bf16", avx512bf16_table, [] { return refused(has_avx512bf16()); }, true},
    {"avx512", avx512_table, [] { return refused(has_avx512()); }, true},
    {"avx2", avx2_table, [] { return refused(has_avx2()); }, true},
    {"amx_emulated", amx_emulated_table, [] { return refused(has_avx2()); }, false},
#endif
    {"portable", portable_table, no_refusal, true},
};

const Candidate& find(const std::string& name, const char* source) {
  std::string known;
  for (const Candidate& candidate : kCandidates) {
    if (name == candidate.name) return candidate;
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  }
  throw std::runtime_error(std::string(source) + " must be one of " + known + ", got '" + name + "'");
}

const IsaTable& usable(const std::string& name, const char* source) {
  const Candidate& candidate = find(name, source);
  const std::string refusal = candidate.refusal();
  if (refusal.empty()) return candidate.table();
  throw std::runtime_error(std::string(source) + " must be an instruction set of this machine, got '" + name +
                           "': " + refusal);
}

const IsaTable& initial() {
  const char* wanted = std::getenv("MOEQ_CPU_ISA");
  if (wanted != nullptr && *wanted != 0) return usable(wanted, "MOEQ_CPU_ISA");
  for (const Candidate& candidate : kCandidates) {
    if (candidate.automatic && candidate.refusal().empty()) return candidate.table();
  }
  return portable_table();
}

std::atomic<const IsaTable*> current{nullptr};

}  // namespace

const IsaTable& isa_table() {
  const IsaTable* table = current.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = &initial();
    current.store(table, std::memory_order_release);
  }
  return *table;
}

void use_isa(const std::string& name) { current.store(&usable(name, "isa"), std::memory_order_release); }

std::string isa_refusal(const std::string& name) { return find(name, "isa").refusal(); }

}  // namespace moeq::cpu

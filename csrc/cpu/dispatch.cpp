#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace moeq::cpu {
namespace {

struct Candidate {
  const char* name;
  const IsaTable& (*table)();
  bool (*supported)();
};

bool has_portable() { return true; }

#ifdef MOEQ_X86
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

// The best one first.
const Candidate kCandidates[] = {
#ifdef MOEQ_X86
    {"avx512bf16", avx512bf16_table, has_avx512bf16},
    {"avx512", avx512_table, has_avx512},
    {"avx2", avx2_table, has_avx2},
#endif
    {"portable", portable_table, has_portable},
};

const IsaTable& find(const std::string& name, const char* source) {
  std::string known;
  for (const Candidate& candidate : kCandidates) {
    if (name == candidate.name) {
      if (candidate.supported()) return candidate.table();
      throw std::runtime_error(std::string(source) + " must be an instruction set of this machine, got '" + name + "'");
    }
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  }
  throw std::runtime_error(std::string(source) + " must be one of " + known + ", got '" + name + "'");
}

const IsaTable& initial() {
  const char* wanted = std::getenv("MOEQ_CPU_ISA");
  if (wanted != nullptr && *wanted != 0) return find(wanted, "MOEQ_CPU_ISA");
  for (const Candidate& candidate : kCandidates) {
    if (candidate.supported()) return candidate.table();
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

void use_isa(const std::string& name) { current.store(&find(name, "isa"), std::memory_order_release); }

}  // namespace moeq::cpu

#include "integers.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "amx_machine.h"

namespace moeq::cpu {
namespace {

struct Candidate {
  const char* name;
  Dot (*find)(const DotKey&);
  bool (*supported)();
  const char* tables;  // instruction sets beside which it is taken, each between spaces
};

#ifdef MOEQ_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#ifdef MOEQ_AVXVNNI
bool has_avxvnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
#endif
bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#ifdef MOEQ_AMX
bool has_amx() { return has_avx512vnni() && amx_refusal().empty() && amx_has_int8() && amx_multiplies_bytes(); }
#endif
#endif

// The best one first.
const Candidate kCandidates[] = {
#ifdef MOEQ_AMX
    {"amx", amx_integer_dot, has_amx, " amx "},
#endif
#ifdef MOEQ_X86
    {"avx512vnni", avx512vnni_integer_dot, has_avx512vnni, " amx avx512bf16 avx512 "},
    {"avx512", avx512_integer_dot, has_avx512, " amx avx512bf16 avx512 "},
#ifdef MOEQ_AVXVNNI
    {"avxvnni", avxvnni_integer_dot, has_avxvnni, " avx2 amx_emulated "},
#endif
    {"avx2", avx2_integer_dot, has_avx2, " avx2 amx_emulated "},
    {"amx_emulated", amx_emulated_integer_dot, has_avx2, " nothing: for tests "},
#endif
    {"portable", portable_integer_dot, [] { return true; }, ""},
};

std::atomic<const Candidate*> asked_for{nullptr};

const Candidate& chosen(const IsaTable& table) {
  const Candidate* asked = asked_for.load(std::memory_order_acquire);
  if (asked != nullptr) return *asked;
  const std::string name = " " + std::string(table.name) + " ";
  const Candidate* candidate = kCandidates;
  while (*candidate->tables != 0 &&
         (std::strstr(candidate->tables, name.c_str()) == nullptr || !candidate->supported())) {
    ++candidate;
  }
  return *candidate;  // the last one serves every table
}

bool are_integers(const DotKey& key) {
  const bool codes = key.scheme == Scheme::kInt4 || key.scheme == Scheme::kMxint4 || key.scheme == Scheme::kInt8;
  return codes && key.has_scale && key.act_format == ActFormat::kInt8;
}

bool are_e2m1(const DotKey& key) {
  return (key.scheme == Scheme::kNvfp4 && key.act_format == ActFormat::kNvfp4) ||
         (key.scheme == Scheme::kMxfp4 && key.act_format == ActFormat::kMxfp4);
}

}  // namespace

Dot find_dot(const DotKey& key, const IsaTable& table) {
  return are_integers(key) || are_e2m1(key) ? chosen(table).find(key) : table.find_dot(key);
}

std::string integer_isa(const IsaTable& table) { return chosen(table).name; }

void use_integer_isa(const std::string& name) {
  if (name.empty()) return asked_for.store(nullptr, std::memory_order_release);
  std::string known;
  for (const Candidate& candidate : kCandidates) {
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
    if (name != candidate.name) continue;
    if (!candidate.supported()) {
      throw std::runtime_error("isa must be an instruction set of this machine, got '" + name + "'");
    }
    return asked_for.store(&candidate, std::memory_order_release);
  }
  throw std::runtime_error("isa must be one of " + known + ", got '" + name + "'");
}

}  // namespace moeq::cpu

#include "names.h"

namespace moeq::cpu {
namespace {

template <class Enum>
struct Entry {
  const char* name;
  Enum value;
};

template <class Enum, size_t N>
bool look_up(const Entry<Enum> (&table)[N], const std::string& name, Enum& value) {
  for (const Entry<Enum>& entry : table) {
    if (name == entry.name) {
      value = entry.value;
      return true;
    }
  }
  return false;
}

constexpr Entry<Scheme> kSchemes[] = {
    {"none", Scheme::kNone},     {"nvfp4", Scheme::kNvfp4}, {"mxfp4", Scheme::kMxfp4},        {"mxfp8", Scheme::kMxfp8},
    {"mxfp6", Scheme::kMxfp6},   {"mxint4", Scheme::kMxint4}, {"int4", Scheme::kInt4},        {"fp8", Scheme::kFp8},
    {"fp8_block", Scheme::kFp8Block}, {"int8", Scheme::kInt8},
};

constexpr Entry<ActFormat> kActFormats[] = {
    {"none", ActFormat::kNone},   {"nvfp4", ActFormat::kNvfp4},           {"mxfp4", ActFormat::kMxfp4},
    {"mxfp8", ActFormat::kMxfp8}, {"mxfp6_e3m2", ActFormat::kMxfp6E3m2}, {"mxfp6_e2m3", ActFormat::kMxfp6E2m3},
    {"fp8", ActFormat::kFp8},     {"int8", ActFormat::kInt8},
};

constexpr Entry<Activation> kActivations[] = {
    {"silu", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_tanh", Activation::kGeluTanh},
    {"relu2", Activation::kRelu2},
    {"swigluoai", Activation::kSwigluOai},
    {"swiglustep", Activation::kSwigluStep},
    {"situ", Activation::kSitu},
    {"silu_no_mul", Activation::kSiluNoMul},
    {"gelu_no_mul", Activation::kGeluNoMul},
    {"relu2_no_mul", Activation::kRelu2NoMul},
    {"identity_no_mul", Activation::kIdentityNoMul},
};

}  // namespace

bool parse(const std::string& name, Scheme& scheme) { return look_up(kSchemes, name, scheme); }
bool parse(const std::string& name, ActFormat& format) { return look_up(kActFormats, name, format); }
bool parse(const std::string& name, Activation& activation) { return look_up(kActivations, name, activation); }

}  // namespace moeq::cpu

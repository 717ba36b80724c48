// The names that cross the op schema.
#pragma once

#include <string>

#include "args.h"

namespace moeq::cpu {

// Each returns false where the name is unknown.
bool parse(const std::string& name, Scheme& scheme);
bool parse(const std::string& name, ActFormat& format);
bool parse(const std::string& name, Activation& activation);

}  // namespace moeq::cpu

// Whether this process may use the tile registers of AMX.
#pragma once

#include <string>

namespace moeq::cpu {

// Why it may not; empty where it may. Asks the operating system for the registers the first time.
const std::string& amx_refusal();

// Whether the processor multiplies bytes in them too (AMX-INT8); to be asked where there is no refusal.
bool amx_has_int8();

}  // namespace moeq::cpu

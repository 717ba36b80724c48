// Which cores a thread may use.
#pragma once

namespace moeq::cpu {

// Gives the calling thread the cores of all threads of this process together. A thread that another one starts has the
// other's, which may be a single one: OpenMP binds threads where OMP_PROC_BIND says so, and the caller is one of them.
// What taskset or a container leaves the process stays its bound. Nothing happens where the system does not tell.
void use_cores_of_process();

}  // namespace moeq::cpu

// Host functions in a CUDA stream, by the driver that the process has loaded: nothing of CUDA is compiled or linked.
#pragma once

#include <string>

namespace moeq::cpu {

// Enqueues function(data) on a stream (a CUstream) of the current context, or makes it a node of the graph that the
// stream is captured into. Returns why not, or an empty text.
std::string enqueue_host_function(void* stream, void (*function)(void*), void* data);

}  // namespace moeq::cpu

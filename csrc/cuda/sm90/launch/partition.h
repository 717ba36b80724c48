// What a stream's launches have of the GPU: all multiprocessors, those of a green context, or a share under MPS.
#pragma once
#include "../problem/problem.h"

namespace moeq::sm90 {

// Of the current device's stream. Asked at each call, as a stream's handle may be used again for another context's.
cudaError_t partition_of(cudaStream_t stream, Partition& partition);

}  // namespace moeq::sm90

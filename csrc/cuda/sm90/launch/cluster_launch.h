// Launches of clusters, which may begin before the previous kernel has ended (dependent_launch.h).
#pragma once
#include "known_devices.h"

namespace moeq::sm90 {

constexpr int kPortableCluster = 8;  // blocks that a cluster may have on every device

// Lets a kernel have clusters of more blocks.
inline cudaError_t allow_large_clusters(const void* kernel, KnownDevices& known) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < kKnownDevices && known[device])) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (device < kKnownDevices) known[device] = error == cudaSuccess;
  return error;
}

template <class Args>
cudaError_t launch_clusters_after(void (*kernel)(Args), const Args& args, int clusters, int blocks, int threads,
                                  cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace moeq::sm90

// What the programs about waits have in common: memory of zeros, and how long CUDA took to end what `run` launched.
#pragma once
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>

template <class T>
T* zeros(size_t count) {
  void* memory = nullptr;
  cudaMalloc(&memory, count * sizeof(T));
  cudaMemset(memory, 0, count * sizeof(T));
  return static_cast<T*>(memory);
}

template <class Run>
int time_of(Run run) {
  cudaFree(nullptr);
  const auto start = std::chrono::steady_clock::now();
  const cudaError_t launched = run();
  const cudaError_t ended = launched != cudaSuccess ? launched : cudaDeviceSynchronize();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%.2f s: %s\n", seconds.count(), cudaGetErrorName(ended));
  return 0;
}

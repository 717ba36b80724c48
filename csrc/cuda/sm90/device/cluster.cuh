// Blocks of a cluster: who one is, barriers among them, and accesses to each other's shared memory.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}

// All threads of the cluster arrive, and wait for each other. The first form orders no memory: it says that a block
// runs.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Of a variable in shared memory: where the block `rank` of the cluster has it.
__device__ __forceinline__ uint32_t address_in_block(uint32_t shared, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

__device__ __forceinline__ void store_in_cluster(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ int load_in_cluster(uint32_t address) {
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace moeq::sm90

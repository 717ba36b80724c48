// The Hopper instructions that the kernels are made of, one function each: barriers in shared memory and rings of them,
// copies that report to them, ordering of wgmma, dependent launches, matrices to and from shared memory, clusters.
//
// By <cuda/ptx> where it has the instruction and machine code is as good with it: its bulk copies and waits cost more
// instructions (docs/design.md, section 20); and sanitizers name lines of barrier_init and barrier_expect here
// (scripts/racecheck_accepted.json).
#pragma once
#include <cstdint>
#include <cuda/ptx>
#include <type_traits>

namespace moeq::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  cuda::ptx::mbarrier_arrive(static_cast<uint64_t*>(__cvta_shared_to_generic(barrier)));
}

// The same barrier (or any word), known once `word` has been loaded. An arrival does not wait for the loads in front of
// it, and a bulk copy that the arrival allows can be there before them: a load of scales came after the copy of the
// next ones (docs/hopper.md, "What compiling does not see"). So who tells a barrier that a bulk copy may overwrite what
// it has read passes what its last loads brought through here. Blocks have 32 threads and more.
__device__ __forceinline__ uint32_t once_loaded(uint32_t barrier, uint32_t word) {
  uint32_t same;  // + 0, which the compiler does not know: a shift by at least 32
  asm volatile(
      "{ .reg .b32 zero; mov.u32 zero, %%ntid.x;\n"
      "shr.u32 zero, %2, zero; add.u32 %0, %1, zero; }"
      : "=r"(same)
      : "r"(barrier), "r"(word)
      : "memory");
  return same;
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// After barrier_init, by who did it: for the copies that report to them.
__device__ __forceinline__ void fence_barrier_init() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}

// Returns once the barrier's phase of this parity is over. A barrier starts in phase 0, so parity 1 returns at once.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The first `threads` threads to come here wait for each other; `name` is 1 to 15.
__device__ __forceinline__ void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Sizes and addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// 4 bytes; `copy_wait` waits for all of this thread's.
__device__ __forceinline__ void copy4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Between accesses of threads and accesses of the tensor cores or the copy engine to the same memory.
__device__ __forceinline__ void fence_async_proxy() { cuda::ptx::fence_proxy_async(); }

// At most `pending` groups are still running afterwards.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Rows of 128 bytes, 8 of them (1024 bytes) a swizzle atom, atoms one after another: K-major, swizzled over 128 bytes.
__device__ __forceinline__ uint64_t swizzled_operand(uint32_t address) {
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Four 8 x 8 matrices of 16-bit values, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

template <int registers>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// All kernels in front are over then, and their writes visible. See launches.h.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Before or after the wait: whatever begins then waits for itself. A call's first launch: after it (load_settled).
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// An input of the call: before the wait, in any launch but the call's first. That one lets nobody begin before it has
// waited for all that is in front of it, and none behind it writes inputs. Past the L1: writes of kernels that are
// over are visible to the grid that waited, and in the L2 to all.
template <class T>
__device__ __forceinline__ T load_settled(const T* p) {
  return __ldcg(p);
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// A place in a ring of stages and the parity of the round.
template <int size>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == size) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Fragments of matrices from shared memory.

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8 and gets of each the two
// values 2 * (l % 4) of row l / 4. Volatile: it must not move across the barriers that say when the bytes are there.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(address)
               : "memory");
  return m;
}

// Blocks of a cluster: who one is, barriers among them, and accesses to each other's shared memory.
__device__ __forceinline__ int cluster_rank() { return static_cast<int>(cuda::ptx::get_sreg_cluster_ctarank()); }

__device__ __forceinline__ int cluster_size() { return static_cast<int>(cuda::ptx::get_sreg_cluster_nctarank()); }

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

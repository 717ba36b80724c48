// The wait of prefill's persistent kernel for an intermediate that nobody makes, by its own code: the kernel goes on,
// and the launch that comes last tells it.
#include "../../csrc/cuda/sm90/prefill/combine.cu"
#include "../../csrc/cuda/sm90/gemm/gemm_pipeline.cuh"
#include "timed_wait.cuh"

using namespace moeq::sm90;

// Many waits: after the first, all are to end soon.
__global__ void wait_for_intermediates(const __grid_constant__ GemmArgs args, int times) {
  Work work{};
  work.arrivals = 1;
  for (int i = 0; i < times; ++i) wait_for_intermediate(args, work);
}

int main() {
  return time_of([] {
    GemmArgs args{};
    args.schedule.finished = zeros<int>(1);
    args.schedule.overdue = zeros<int>(1);
    wait_for_intermediates<<<8, 1>>>(args, 100);
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return error;
    Problem p{};
    p.tokens = 1;
    p.hidden = 64;
    p.out = zeros<uint16_t>(64);
    return launch_combine({p, zeros<uint16_t>(64), false, args.schedule.overdue});
  });
}

// Waits of the decode kernels for what nobody ever does, by their own code; the argument says which.
#include <cstring>

#include "../../csrc/cuda/sm90/decode/decode_exchange.cuh"
#include "../../csrc/cuda/sm90/decode/decode_kernel.cuh"
#include "timed_wait.cuh"

using namespace moeq::sm90;

__global__ void wait_for_barrier(const decode::State* state) { decode::await_arrivals(state, 1); }

__global__ void wait_for_launch(const uint32_t* epochs) { few::await_epochs(epochs, 1); }

__global__ void wait_for_sums(const few::Pair* sent, uint64_t* to) {
  few::Pair pair = few::look(sent);
  few::await(pair, sent, few::kOnlyEpoch);
  *to = pair.first;
}

int main(int, char** arguments) {
  return time_of([&] {
    if (std::strcmp(arguments[1], "barrier") == 0) {
      wait_for_barrier<<<1, 1>>>(zeros<decode::State>(1));
    } else if (std::strcmp(arguments[1], "launch") == 0) {
      wait_for_launch<<<2, 32>>>(zeros<uint32_t>(2));
    } else {
      wait_for_sums<<<16, 256>>>(zeros<few::Pair>(1), zeros<uint64_t>(1));
    }
    return cudaGetLastError();
  });
}

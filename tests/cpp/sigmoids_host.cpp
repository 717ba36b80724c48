// The functions of sigmoid and tanh of the Hopper kernels behind a C interface, so that a test can run them without a
// GPU.
#include "../../csrc/cuda/sm90/numerics/sigmoids.cuh"

extern "C" void tanhs(const float* numbers, int64_t count, float* results) {
  for (int64_t i = 0; i < count; ++i) results[i] = moeq::sm90::tanh_of(numbers[i]);
}

extern "C" void gelu_tanhs(const float* numbers, int64_t count, float* results) {
  for (int64_t i = 0; i < count; ++i) results[i] = moeq::sm90::gelu_tanh(numbers[i]);
}

extern "C" void situs(const float* gates, const float* ups, int64_t count, float alpha, float beta, float* results) {
  for (int64_t i = 0; i < count; ++i) results[i] = moeq::sm90::situ(alpha, beta, gates[i], ups[i]);
}

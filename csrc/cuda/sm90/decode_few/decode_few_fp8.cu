// The kernels of very few tokens with weights of e4m3, of int8 and of MXFP8.
#include "decode_few.h"
#include "decode_few_fp8_gemm.cuh"
#include "decode_few_kernel.cuh"

namespace moeq::sm90::few {

cudaError_t make_fp8_plan(const W4a8Problem& p, Plan& plan, bool& fits) {
  // Tokens whose scale depends on the expert, or that are codes already, are for the prefill kernels.
  fits = p.a1 != ActScale::kExpert && p.x_scale == nullptr;
  if (!fits) {
    return cudaSuccess;
  }
  Problem unrounded = p;   // what rounds to NVFP4 has nothing to do
  unrounded.a1 = unrounded.a2 = ActScale::kNone;
  const Fp8 fp8 = {{p.scales13, p.scales2}, {p.a1, p.a2}, {p.a1_gscale, p.a2_gscale}, {}};
  const Codes codes = p.weights == Weights::kPacked   ? Codes::kPacked
                      : p.weights == Weights::kBlocks ? Codes::kFp8Groups
                                                      : Codes::kFp8Rows;
  return make_plan(unrounded, codes, fp8, plan, fits);
}

template <bool rounds>
static const void* kernel_of_fp8(bool groups, Kind kind) {
  return groups ? kernel_of<Fp8Format<true, rounds>>(kind) : kernel_of<Fp8Format<false, rounds>>(kind);
}

cudaError_t run_fp8(Plan& plan) {
  static KnownDevices known[7][kKinds];
  const Kind kind = plan.kind;
  if (plan.codes == Codes::kPacked) {
    const bool mx = plan.args.p.format == Format::kMxfp4;
    const void* kernel =
        mx ? kernel_of<PackedFormat<w4a8::PackedMxfp4>>(kind) : kernel_of<PackedFormat<w4a8::PackedNvfp4>>(kind);
    return launch(plan, kernel, known[mx ? 5 : 4][static_cast<int>(kind)]);
  }
  if (plan.codes == Codes::kInt8) {
    return launch(plan, kernel_of<Int8Format>(kind), known[6][static_cast<int>(kind)]);
  }
  const bool rounds = !are_bytes_beside_16(plan.codes);
  const bool groups = plan.codes == Codes::kFp8Groups || plan.codes == Codes::kBlocksBeside16;
  const void* kernel = rounds ? kernel_of_fp8<true>(groups, kind) : kernel_of_fp8<false>(groups, kind);
  return launch(plan, kernel, known[groups + 2 * rounds][static_cast<int>(kind)]);
}

// The kernels of a decode of very few tokens for MXFP8 weights.
cudaError_t run_mxfp8(Plan& plan) {
  static KnownDevices known[2][kKinds];
  const Kind kind = plan.kind;
  const bool rounds = plan.codes == Codes::kBothMxfp8;
  const void* kernel = rounds ? kernel_of<BesideE4m3<Mxfp8Format>>(kind) : kernel_of<Mxfp8Format>(kind);
  return launch(plan, kernel, known[rounds][static_cast<int>(kind)]);
}

}  // namespace moeq::sm90::few

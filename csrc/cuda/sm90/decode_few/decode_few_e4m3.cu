// The kernels of a decode of very few tokens with weights of at most 8 bits beside e4m3 activations, and what the host
// says to them.
#include "decode_few.h"
#include "decode_few_kernel.cuh"

namespace moeq::sm90::few {

static Codes codes_of(const RoundedProblem& p) {
  if (p.format == Format::kFp8) {
    return p.scales13.blocks ? Codes::kFp8Groups : Codes::kFp8Rows;
  }
  if (p.format == Format::kMxfp8) {
    return Codes::kBothMxfp8;
  }
  return p.act_format == ActFormat::kMxfp8 ? Codes::kBesideMxfp8 : Codes::kBesideFp8;
}

cudaError_t make_e4m3_plan(const RoundedProblem& p, Plan& plan, bool& fits) {
  // Tokens whose scale depends on the expert, or that are codes already, are for the prefill kernels.
  fits = p.a1 != ActScale::kNone && p.a1 != ActScale::kExpert && p.a2 != ActScale::kNone;
  if (!fits) {
    return cudaSuccess;
  }
  const Fp8 fp8 = {{p.scales13, p.scales2}, {p.a1, p.a2}, {p.a1_gscale, p.a2_gscale}, {}};
  const Codes codes = codes_of(p);
  return make_plan(without_e4m3(p), codes, fp8, plan, fits);
}

template <class Format>
static const void* gathered_or(Kind kind) {
  return kind == Kind::kGathered ? kernel<Format, Kind::kGathered>() : kernel_of<Format>(kind);
}

static const void* e4m3_kernel_of(Format format, Kind kind) {
  switch (format) {
    case Format::kMxfp4:
      return gathered_or<BesideE4m3<Mxfp4Format>>(kind);
    case Format::kNvfp4:
      return gathered_or<BesideE4m3<Nvfp4Format>>(kind);
    default:
      return int4_e4m3_kernel_of(format, kind);
  }
}

cudaError_t run_e4m3(Plan& plan) {
  if (are_bytes(plan.codes)) {
    return run_fp8(plan);
  }
  if (are_mxfp8(plan.codes)) {
    return run_mxfp8(plan);
  }
  static KnownDevices known[kFormats][kKinds];
  const Format format = plan.args.p.format;
  return launch(plan, e4m3_kernel_of(format, plan.kind), known[static_cast<int>(format)][static_cast<int>(plan.kind)]);
}

}  // namespace moeq::sm90::few

// The decode of few tokens whose rows are gathered: see Kind::kGathered.
#pragma once
#include "decode_few.h"

namespace moeq::sm90::few {

cudaError_t run_gathered(Plan& plan);
const void* gathered_int4_kernel_of(Format format);
// That of launches which take the whole device. It is far larger than that of the other kinds, and lies beside these
// kernels, so that memory is taken when the first of them is.
cudaError_t find_gathered_exchange(Args& args);

}  // namespace moeq::sm90::few

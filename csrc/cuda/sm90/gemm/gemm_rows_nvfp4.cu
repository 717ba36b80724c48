// The persistent kernels of gemm_rows.cuh for NVFP4 weights.
#include "gemm_rows.cuh"

namespace moeq::sm90 {
template RowsVariant rows_variant<Nvfp4Format, Shape::kSlim>();
template RowsVariant rows_variant<Nvfp4Format, Shape::kNarrow>();
template RowsVariant rows_variant<Nvfp4Format, Shape::kWide>();
}  // namespace moeq::sm90

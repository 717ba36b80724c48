// The persistent kernels of gemm_rows.cuh for MXFP4 weights.
#include "gemm_rows.cuh"

namespace moeq::sm90 {
template RowsVariant rows_variant<Mxfp4Format, Shape::kSlim>();
template RowsVariant rows_variant<Mxfp4Format, Shape::kNarrow>();
template RowsVariant rows_variant<Mxfp4Format, Shape::kWide>();
}  // namespace moeq::sm90

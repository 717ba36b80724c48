// The schemes: which decoder, which scale, how many units share a scale. A scheme adds an alias and a line.
#pragma once

#include "decode_codes4.h"
#include "decode_codes8.h"
#include "decode_plain.h"
#include "dot.h"
#include "scales.h"
#ifdef MOEQ_TILES
#include "tile_gemm.h"
#elif defined(MOEQ_BF16)
#include "row_blocks.h"
#endif

namespace moeq::cpu::MOEQ_ISA {

template <class Decoder, class BlockScale, int GroupUnits, int PrefetchBytes = 8192>
struct Weights {
  using Codes = Decoder;
  using Scale = BlockScale;
  static constexpr int kGroupUnits = GroupUnits;  // 0: the call says
  static constexpr int kPrefetchBytes = PrefetchBytes;
};

// Of a scheme whose groups the layout fixes.
template <Scheme scheme, class Decoder, class BlockScale>
using Blocks = Weights<Decoder, BlockScale, layout_of(scheme).group_units>;

using Nvfp4Weights = Blocks<Scheme::kNvfp4, Codes4<E2m1>, E4m3Scale>;
using Mxfp4Weights = Blocks<Scheme::kMxfp4, Codes4<E2m1>, E8m0Scale>;
using Mxint4Weights = Blocks<Scheme::kMxint4, Codes4<Signed4>, FloatScale<DType::kBFloat16>>;
using Mxfp8Weights = Blocks<Scheme::kMxfp8, Codes8<E4m3Bytes>, E8m0Scale>;  // mxfp6 too: its values are e4m3 values
using Fp8Weights = Weights<Codes8<E4m3Bytes>, FloatScale<DType::kFloat32>, 0>;
using Fp8UnscaledWeights = Weights<Codes8<E4m3Bytes>, NoScale, 8>;
using Fp8BlockWeights = Blocks<Scheme::kFp8Block, Codes8<E4m3Bytes>, TileScale>;
template <DType kType>
using Int4Weights = Weights<Codes4<Offset8>, FloatScale<kType>, 0>;
template <DType kType>
using Int4ZeroWeights = Weights<Codes4Zero, FloatScale<kType>, 0>;
template <DType kType>
using Int8Weights = Weights<Codes8<Int8Bytes>, FloatScale<kType>, 0>;
template <DType kType>
using Int8ZeroWeights = Weights<Int8Zero, FloatScale<kType>, 0>;
using Bf16Weights = Weights<PlainBf16, NoScale, 2>;
using F16Weights = Weights<PlainF16, NoScale, 2>;
using F32Weights = Weights<PlainF32, NoScale, 2>;

// Tiles have no float32 operands: the instruction set that such a table is made from serves those.
template <class W>
Dot in_float32() {
#ifdef MOEQ_TILES
  return {};
#else
  return {dot<W, OperandF32>, OperandType::kFloat32};
#endif
}

// Operands are bf16 where the instruction set multiplies bf16 and nothing is lost by it: quantized
// activations always fit, unquantized ones if they were bf16.
template <class W>
Dot choose(const DotKey& key) {
  const bool fits = key.act_format != ActFormat::kNone || key.act_dtype == DType::kBFloat16;
#if defined(MOEQ_TILES)
  if (fits) return tile_dot<W>();
#elif defined(MOEQ_BF16)
  if (fits) return block_dot<W>();
#endif
  (void)fits;
  return in_float32<W>();
}

template <DType kType>
Dot choose_int8(const DotKey& key) {
  if (key.zero_points) return in_float32<Int8ZeroWeights<kType>>();
  return choose<Int8Weights<kType>>(key);
}

// Schemes whose scales come in any float dtype.
template <DType kType>
Dot choose_integers(const DotKey& key) {
  if (key.scheme == Scheme::kInt8) return choose_int8<kType>(key);
  return key.zero_points ? choose<Int4ZeroWeights<kType>>(key) : choose<Int4Weights<kType>>(key);
}

inline Dot find_plain(const DotKey& key) {
  if (key.weight_dtype == DType::kBFloat16) return choose<Bf16Weights>(key);
  if (key.weight_dtype == DType::kFloat16) return in_float32<F16Weights>();
  return in_float32<F32Weights>();
}

inline Dot find_dot(const DotKey& key) {
  switch (key.scheme) {
    case Scheme::kNone:
      return find_plain(key);
    case Scheme::kNvfp4:
      return choose<Nvfp4Weights>(key);
    case Scheme::kMxfp4:
      return choose<Mxfp4Weights>(key);
    case Scheme::kMxint4:
      return choose<Mxint4Weights>(key);
    case Scheme::kMxfp6:
    case Scheme::kMxfp8:
      return choose<Mxfp8Weights>(key);
    case Scheme::kFp8:
      return key.has_scale ? choose<Fp8Weights>(key) : choose<Fp8UnscaledWeights>(key);
    case Scheme::kFp8Block:
      return choose<Fp8BlockWeights>(key);
    case Scheme::kInt4:
    case Scheme::kInt8:
      break;
  }
  if (key.scale_dtype == DType::kBFloat16) return choose_integers<DType::kBFloat16>(key);
  if (key.scale_dtype == DType::kFloat16) return choose_integers<DType::kFloat16>(key);
  return choose_integers<DType::kFloat32>(key);
}

}  // namespace moeq::cpu::MOEQ_ISA

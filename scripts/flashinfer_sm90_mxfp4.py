"""The sources of FlashInfer's CUTLASS MoE module for Hopper that layers with MXFP4 weights call.

Activations in bfloat16 (W4A16) or quantised to e4m3 by token inside the layer (W4A8). Both run mixed-input grouped
GEMMs whose rows are the weights' rows and whose columns are the tokens. scripts/flashinfer_sm90_subset.py builds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACE = "tensorrt_llm::kernels::cutlass_kernels"
LAUNCHER = "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_mixed_input_launcher.inl"
BF16, FP8 = "__nv_bfloat16", "__nv_fp8_e4m3"
HUMMING = "Sm90Wfp4Afp8ScaleMode::kHummingPreMmaE8M0"
KEPT = (
    "moe_gemm_tma_warp_specialized_input.cu",
    "moe_gemm_mixed_utils.cu",
    "flashinfer_cutlass_fused_moe_binding.cu",
    "deepgemm_jit_setup.cu",
    "memoryUtils.cu",
    "preQuantScaleKernel.cu",
)


@dataclass(frozen=True)
class Tile:
    """Rows of weights, tokens and K of a tile, the rows of a cluster, and the main loop."""

    rows: int
    tokens: int
    k: int = 128
    cluster: int = 1
    kind: str = "warp_specialized"

    def is_made_by(self, operation: Any) -> bool:
        """Whether it is this operation of FlashInfer's generator; its runner offers one schedule for each tile."""
        schedule = "Cooperative" if self.rows >= 128 else "Pingpong"
        return (
            operation.cta_shape == (self.rows, self.tokens, self.k)
            and operation.cga_shape == (self.cluster, 1, 1)
            and operation.sm90_mixed_input_kernel_type == self.kind
            and (self.kind != "warp_specialized" or operation.mainloop_schedule.name.endswith(schedule))
        )


# 64x16x128 is what the runner takes where nothing was tuned; 128x64x256 sizes its workspace. K must be a multiple of
# a tile's K and the weights' rows one of its rows: gpt-oss, padded to 2944, can run the tiles with K = 128 alone.
FEW = (Tile(64, 16), Tile(64, 32), Tile(128, 16))
MORE = (Tile(128, 32), Tile(128, 64), Tile(128, 64, 256))
BETWEEN = (Tile(64, 64), Tile(64, 128))
MANY = (Tile(128, 128), Tile(128, 128, cluster=2), Tile(128, 256), Tile(256, 128))
DEEP = (Tile(64, 16, 256), Tile(128, 16, 256), Tile(128, 128, 256))
# One warpgroup a block and several blocks an SM, for K above 384: only W4A8 has it.
ROLLING = tuple(Tile(128, tokens, kind="single_warpgroup_rolling") for tokens in (8, 16, 32, 64))
# A source compiles for about a minute before its first kernel, so several share one.
KERNELS = {
    "kernels_bf16_few.cu": (BF16, FEW),
    "kernels_bf16_more.cu": (BF16, MORE),
    "kernels_bf16_between.cu": (BF16, BETWEEN),
    "kernels_bf16_many.cu": (BF16, MANY),
    "kernels_bf16_deep.cu": (BF16, DEEP),
    "kernels_fp8_rolling.cu": (FP8, ROLLING),
    "kernels_fp8_few.cu": (FP8, FEW),
    "kernels_fp8_more.cu": (FP8, MORE),
    "kernels_fp8_between.cu": (FP8, BETWEEN),
    "kernels_fp8_many.cu": (FP8, MANY),
    "kernels_fp8_deep.cu": (FP8, DEEP),
}


def is_kept(source: Path) -> bool:
    """Of FlashInfer's own sources, those that are compiled as they are."""
    return source.name in KEPT or source.suffix == ".cpp"


def kernels(activations: str, tiles: tuple[Tile, ...]) -> str:
    """One source with the launchers of these tiles, as FlashInfer's generator writes them."""
    from flashinfer.jit.gemm.cutlass import generate_kernels as theirs

    made = [
        operation
        for operation in theirs.generate_sm90_mixed_type_grouped_gemm_operations(True)
        if theirs.CudaTypeName[operation.act_type] == activations
        and theirs.CudaTypeName[operation.output_type] == BF16
        and operation.weight_type == theirs.e2m1
    ]
    chosen = [operation for tile in tiles for operation in made if tile.is_made_by(operation)]
    if len(chosen) != len(tiles):
        raise RuntimeError(f"this release of flashinfer has {len(chosen)} of the {len(tiles)} kernels {tiles}")
    text: str = theirs.get_file_content([LAUNCHER], chosen)
    return text


def dispatch() -> str:
    """The source with the choice of a launcher for a tile."""
    lines = ['#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h"']
    lines.append(f"namespace {NAMESPACE} {{")
    lines.append(f"template class MoeGemmRunner<{BF16}, Fp4Type, {BF16}>;")
    lines.append(f"template class MoeGemmRunner<{FP8}, Fp4Type, {BF16}, {BF16}, false, {HUMMING}>;")
    return "\n".join([*lines, "}", ""])


def runners() -> str:
    """The source with the layers: permutation, GEMM, activation, GEMM, weighted sum."""
    lines = ['#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"', '#include "moe_kernels.h"']
    lines.append(f"namespace {NAMESPACE} {{")
    lines.append(f"template class CutlassMoeFCRunner<{BF16}, Fp4Type>;")
    lines.append(f"template class CutlassMoeFCRunner<{FP8}, Fp4Type, {BF16}, {BF16}, {BF16}, false, {HUMMING}>;")
    lines.append(f"INSTANTIATE_FINALIZE_MOE_ROUTING({BF16}, {BF16}, {BF16});")
    return "\n".join([*lines, "}", ""])


def sources() -> dict[str, str]:
    """What is compiled in the place of FlashInfer's generated and instantiating sources, by file name."""
    written = {"runners.cu": runners(), "dispatch.cu": dispatch()}
    return written | {name: kernels(*what) for name, what in KERNELS.items()}

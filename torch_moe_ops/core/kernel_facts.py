"""What Python and the compiled kernels have to agree on, each fact once.

`python scripts/kernel_headers.py --write` writes the headers in csrc/generated: from these tables, the activations
(activations.py), what an op gets of a call (call.py), the scores of routing methods (routing/reference.py), the schemes
and formats of the CPU kernels (backends/cpu_panels). A class of numbers becomes constants, each with its comment:
MAX_SLOTS is kMaxSlots in C++. Tuples of names become enums, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from torch_moe_ops.core import routing_methods
from torch_moe_ops.core.call import KERNEL_FIELDS, WEIGHT_FIELDS


class CpuPanels:
    """The layout "cpu_panels_v1" (csrc/cpu/README.md)."""

    PANEL_ROWS = 16  # output rows that one vector register holds
    UNIT = 16  # elements of K that a decoder handles at once
    TILE = 128  # rows, and values of K, that share a scale of fp8_block


class Sm90:
    """The layout of 4-bit weights (csrc/cuda/sm90/layout/layout.h), and what every Hopper kernel takes."""

    TILE_ROWS = 64
    TILE_K = 64
    TILE_CODE_BYTES = TILE_ROWS * TILE_K // 2
    MAX_EXPERTS = 1024  # local ones: one thread block sorts them
    HALF_SLOTS = 24  # of an expert in the mean: beyond, NVFP4's narrow and wide tiles multiply float16 as it is
    HIDDEN_MULTIPLE = 32  # of the hidden size where weights have 4 bits: a block of MX formats
    BYTE_HIDDEN_MULTIPLE = 16  # of the hidden size where weights have 8 bits: a thread copies as many values
    BF16_SIZE_MULTIPLE = 16  # of the hidden and the intermediate size: a copy's bytes, eight gate rows beside eight up
    ROUTE_EXPERTS = routing_methods.MAX_EXPERTS  # for which there is a routing kernel at all
    ROUTE_TOP_K = routing_methods.MAX_TOP_K  # a lane has a chosen expert
    ROUTE_GROUPS = 32  # a lane has a group's key


class Sm90Decode:
    """The decode kernel."""

    MAX_SLOTS = 2048  # tokens * top_k


class Sm90Few:
    """The decode kernel for very few tokens, which has no grid barriers."""

    MAX_SLOTS = 128  # tokens * top_k
    MAX_TOKENS = 8  # that all lie in shared memory
    MAX_TOKENS_PACKED = 16  # of policy packed, which the other kernel does not decode
    GATHERED_KERNEL = 4  # a number beside SM90_KERNELS: decode, but experts may gather their rows
    GATHERED_TOKENS = 32  # that may be so many then
    GATHERED_SLOTS = 256  # tokens * top_k of these


class Sm90W4a8:
    """The layouts of weights for fp8 GEMMs (csrc/cuda/sm90/layout/w4a8_layout.h)."""

    MAX_K = 65536  # of either GEMM: a row is quantized by one thread block
    TILE_ROWS = 64
    TILE_K = 128
    PACKED_BYTES = TILE_ROWS * TILE_K // 2
    SCALE_BYTES = TILE_ROWS * TILE_K // 16
    FP8_BYTES = TILE_ROWS * TILE_K
    EXPONENT_BIAS = 64
    SLOW_SCALE = 128  # bit of a block scale whose products may be subnormal
    ZERO_SCALE = 248
    SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)  # where code i of a word has its sign
    LARGE_VALUES = 1 << 22  # of an expert's w2, from which on it is a large one: other kernels are the faster ones


@dataclass(frozen=True)
class TileScales:
    """The scales of a format of the layout of 4-bit weights: how many a row of a tile has, and bytes of each element.

    An element has the scales of as many rows as `rows` says.
    """

    in_row: int
    each: int
    rows: int = 1

    @property
    def in_tile(self) -> int:
        """Elements of a tile."""
        return self.in_row * Sm90.TILE_ROWS // self.rows

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's scales."""
        return self.in_tile * self.each


# By these numbers the op tells the formats of 4 bits apart; codes of 8 bits have larger tiles, int8 ones a dtype of
# their own.
SM90_FORMATS: dict[str, TileScales] = {
    "nvfp4": TileScales(4, 1),
    "mxfp4": TileScales(2, 1),
    "int4_per32": TileScales(2, 2),
    "int4_per64": TileScales(1, 2),
    "int4_zero": TileScales(1, 4),
    "int4_zero_bf16": TileScales(1, 8, 2),
    "int4_zero_per32": TileScales(2, 4),
    "int4_float": TileScales(1, 8),
    "fp8": TileScales(0, 4),
    "mxfp8": TileScales(2, 1),
    "int8": TileScales(0, 4),
}
SM90_KERNELS = ("decode", "slim", "narrow", "wide")  # by the numbers that the op knows them by; the last three: tiles
SM90_WEIGHTS = ("packed", "rows", "blocks")  # of fp8 GEMMs (csrc/cuda/sm90/problem/tiled_problem.h)
# To which activations are rounded beside 4-bit weights (csrc/cuda/sm90/problem/tiled_problem.h).
SM90_ACT_FORMATS = ("nvfp4", "fp8", "mxfp8")


class Router(NamedTuple):
    """A router as compiled ops take it: moeq::route's arguments, the method as its two scores."""

    router_logits: Tensor | None
    routing_bias: Tensor | None
    score: str
    weight: str
    renormalize: bool
    top_k: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float


# The compiled ops that run experts: what they get besides `out`, what they have of a call, and a router where they
# take one. Callers name those of an op that has several (own_of: a microsecond less than keywords of a torch op).
OWN_ARGUMENTS: dict[str, dict[str, str]] = {
    "experts": {"scheme": "str", "act_format": "str"},
    "experts_sm90": {"act_format": "str", "quantize_hidden": "bool", "quantize_intermediate": "bool", "kernel": "int"},
    "experts_sm90_rows": {
        "low": "Tensor | None",
        "factor": "Tensor | None",
        "rows": "Tensor | None",
        "kept": "Tensor",
        "second": "bool",
        "kernel": "int",
    },
    "experts_sm90_remote": {
        "act_format": "str",
        "quantize_hidden": "bool",
        "quantize_intermediate": "bool",
        "kernel": "int",
        "heaps": "Tensor",
        "sizes": "Tensor",
        "rank": "int",
    },
    "experts_sm90_bf16": {},
    "experts_sm90_w4a8": {"weights": "str", "decode_tokens": "int"},
}
TAKES_ROUTER = ("experts_sm90",)
# What they fill besides `out`.
FILLS = {"experts_sm90_rows": ("rows", "kept")}
# Tensors of a call that is like an accepted one; the number of the names of both follows (csrc/cpu/accepted.h).
ACCEPTED_TENSORS = ("hidden_states", "topk_ids", "topk_weights", *WEIGHT_FIELDS)
own_of = {op: itemgetter(*names) for op, names in OWN_ARGUMENTS.items() if len(names) > 1}  # of a dictionary


def arguments_of(op: str) -> tuple[str, ...]:
    """The names of a compiled op's arguments, in order."""
    router = Router._fields if op in TAKES_ROUTER else ()
    return ("out", *KERNEL_FIELDS, *router, *OWN_ARGUMENTS[op])


# Of every compiled op that runs experts.
ARGUMENTS: dict[str, tuple[str, ...]] = {op: arguments_of(op) for op in OWN_ARGUMENTS}
ARGUMENTS["experts_accepted"] = (*ACCEPTED_TENSORS, "names")

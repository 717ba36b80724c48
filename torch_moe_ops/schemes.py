"""Weight schemes and activation formats as data.

A scheme says how weights are stored; an activation format says what the GEMM operands made from
activations look like. Nothing here computes: `quant/` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ActFormat:
    """How an activation row of K values is stored once it is quantized."""

    name: str
    dtype: torch.dtype | None  # storage dtype of the codes; None: not quantized
    pack: int = 1  # codes per storage element
    block: int = 0  # values of K that share a scale; 0: the whole row
    scale_dtype: torch.dtype = torch.float32
    size_multiple: int = 1  # K must be a multiple of this


ACT_FORMATS: dict[str, ActFormat] = {
    f.name: f
    for f in (
        ActFormat("none", None),
        ActFormat("nvfp4", torch.uint8, pack=2, block=16, scale_dtype=torch.float8_e4m3fn, size_multiple=16),
    )
}


@dataclass(frozen=True)
class Scheme:
    """How a weight matrix [N, K] is stored.

    `value = code * block scale * scale_2`; absent factors are 1.
    """

    name: str
    weight_dtypes: tuple[torch.dtype, ...]  # storage dtypes of the codes
    act_formats: tuple[str, ...]  # the first one is the op's default
    pack: int = 1  # codes per storage element, along K
    block: int = 0  # values of K that share a block scale; 0: no block scales
    scale_dtype: torch.dtype | None = None
    has_scale_2: bool = False  # a float32 factor per matrix (per half of w13)
    size_multiple: int = 1  # hidden and intermediate size must be multiples of this

    @property
    def op_prefix(self) -> str:
        """"nvfp4_" for nvfp4, "" for unquantized weights: `moe` and `moe_routed`."""
        return "" if self.name == "none" else f"{self.name}_"

    def storage_k(self, k: int) -> int:
        """Storage elements that hold k values of K."""
        if k % self.size_multiple:
            raise ValueError(f"{self.name}: K must be a multiple of {self.size_multiple}, got {k}")
        return k // self.pack

    def logical_k(self, storage_k: int) -> int:
        """Inverse of storage_k."""
        return storage_k * self.pack


SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme(
            "nvfp4",
            weight_dtypes=(torch.uint8,),
            act_formats=("nvfp4", "none"),
            pack=2,
            block=16,
            scale_dtype=torch.float8_e4m3fn,
            has_scale_2=True,
            size_multiple=16,
        ),
        Scheme("none", weight_dtypes=FLOATS, act_formats=("none",)),
    )
}


def get_scheme(name: str) -> Scheme:
    """The descriptor of a scheme; ValueError lists the known names."""
    try:
        return SCHEMES[name]
    except KeyError:
        raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}") from None

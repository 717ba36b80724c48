"""Weight schemes and activation formats as data.

A scheme says how weights are stored; an activation format says what the GEMM operands made from
activations look like. Nothing here computes: `numerics/` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Shape = tuple[int, ...]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest that is not below n. Triton's own is made for kernels, and takes longer than some operations."""
    return 1 << max(n - 1, 0).bit_length()


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
        ActFormat("fp8", torch.float8_e4m3fn),
        ActFormat("int8", torch.int8),
        ActFormat("mxfp8", torch.float8_e4m3fn, block=32, scale_dtype=torch.uint8, size_multiple=32),
        ActFormat("mxfp4", torch.uint8, pack=2, block=32, scale_dtype=torch.uint8, size_multiple=32),
        ActFormat("mxfp6_e3m2", torch.uint8, block=32, scale_dtype=torch.uint8, size_multiple=32),
        ActFormat("mxfp6_e2m3", torch.uint8, block=32, scale_dtype=torch.uint8, size_multiple=32),
    )
}


@dataclass(frozen=True)
class Scales:
    """Which values of a matrix [N, K] share a scale.

    kind "block": `size` of K in a row. "tile": size x size, the halves of w13 tiled separately.
    "group": one of `sizes` of K in a row, or the whole row. "channel": a row, or a whole half of rows.
    """

    kind: str
    dtypes: tuple[torch.dtype, ...]
    size: int = 0
    sizes: tuple[int, ...] = ()

    def shapes(self, rows: int, k: int, halves: int) -> tuple[Shape, ...]:
        """The allowed shapes, without the leading dimension of experts."""
        if self.kind == "block":
            return ((rows, k // self.size),)
        if self.kind == "tile":
            return ((halves * ceil_div(rows // halves, self.size), ceil_div(k, self.size)),)
        if self.kind == "group":
            return (*((rows, k // g) for g in self.sizes if k % g == 0), (rows, 1))
        return ((rows, 1), (halves,), (1,))


@dataclass(frozen=True)
class Scheme:
    """How a weight matrix [N, K] is stored.

    `value = (code - zero point) * scale * scale_2`; absent factors are 1, absent zero points 0
    (8 for int4, whose codes are stored with that offset).
    """

    name: str
    weight_dtypes: tuple[torch.dtype, ...]  # storage dtypes of the codes
    act_formats: tuple[str, ...]  # the first one is the op's default
    op: str = ""  # the ops are <op>_moe and <op>_moe_routed; "": as the scheme
    pack: int = 1  # codes per storage element, along K
    scales: Scales | None = None
    has_scale_2: bool = False  # a float32 factor per matrix (per half of w13)
    has_zero_point: bool = False
    size_multiple: int = 1  # hidden and intermediate size must be multiples of this
    static_acts: tuple[str, ...] = ()  # activation formats that take a calibrated scale
    fp8_group: int = 0  # values of K that share a scale of fp8 activations; 0: the whole row
    policies: tuple[str, ...] = ("exact",)  # of fp8 activations
    element: str = ""  # of the MX formats

    @property
    def family(self) -> str:
        """The op family: "nvfp4" for nvfp4_moe, "" for moe."""
        return "" if self.name == "none" else self.op or self.name

    @property
    def op_prefix(self) -> str:
        """ "nvfp4_" for nvfp4, "" for unquantized weights: `moe` and `moe_routed`."""
        return f"{self.family}_" if self.family else ""

    def storage_k(self, k: int) -> int:
        """Storage elements that hold k values of K."""
        if k % self.size_multiple:
            raise ValueError(f"{self.name}: K must be a multiple of {self.size_multiple}, got {k}")
        return k // self.pack

    def logical_k(self, storage_k: int) -> int:
        """Inverse of storage_k."""
        return storage_k * self.pack

    def act_block(self, act: ActFormat) -> int:
        """Values of K that share a scale of activations under this scheme; 0: the whole row."""
        return self.fp8_group if act.name == "fp8" else act.block

    def act_scale_columns(self, act: ActFormat, k: int) -> int:
        """Scales of one packed activation row of k values."""
        block = self.act_block(act)
        return ceil_div(k, block) if block else 1


_E4M3, _E8M0, _F32 = (torch.float8_e4m3fn,), (torch.uint8,), (torch.float32,)
_MX_ACTS = ("mxfp6_e3m2", "mxfp6_e2m3", "fp8", "none")


def _mx(name: str, element: str, dtype: torch.dtype, acts: tuple[str, ...], **options: object) -> Scheme:
    scales = Scales("block", _E8M0, size=32)
    return Scheme(name, (dtype,), acts, scales=scales, size_multiple=32, element=element, **options)  # type: ignore[arg-type]


SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme(
            "nvfp4",
            (torch.uint8,),
            ("nvfp4", "none", "fp8"),
            pack=2,
            scales=Scales("block", _E4M3, size=16),
            has_scale_2=True,
            size_multiple=16,
            static_acts=("nvfp4",),
            policies=("exact", "packed", "folded"),
        ),
        _mx(
            "mxfp4",
            "e2m1",
            torch.uint8,
            ("none", "mxfp8", "fp8", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"),
            pack=2,
            static_acts=("fp8",),
            policies=("exact", "packed", "folded"),
        ),
        _mx("mxfp8", "e4m3", torch.float8_e4m3fn, ("mxfp8", "none")),
        _mx("mxfp6_e3m2", "e3m2", torch.uint8, _MX_ACTS, op="mxfp6"),
        _mx("mxfp6_e2m3", "e2m3", torch.uint8, ("mxfp6_e2m3", "mxfp6_e3m2", "fp8", "none"), op="mxfp6"),
        Scheme(
            "mxint4",
            (torch.int32,),
            ("none", "int8"),
            pack=8,
            scales=Scales("block", (torch.bfloat16,), size=32),
            size_multiple=32,
        ),
        Scheme(
            "int4",
            (torch.int32,),
            ("none", "fp8", "int8"),
            pack=8,
            scales=Scales("group", FLOATS, sizes=(32, 64, 128)),
            has_zero_point=True,
            size_multiple=8,
        ),
        Scheme(
            "fp8",
            _E4M3,
            ("fp8", "none"),
            scales=Scales("channel", _F32),
            size_multiple=8,
            static_acts=("fp8",),
        ),
        Scheme(
            "fp8_block", _E4M3, ("fp8", "none"), scales=Scales("tile", _F32, size=128), size_multiple=8, fp8_group=128
        ),
        Scheme(
            "int8",
            (torch.int8,),
            ("int8", "none"),
            scales=Scales("group", FLOATS, sizes=(32, 64, 128)),
            has_zero_point=True,
            size_multiple=8,
            static_acts=("int8",),
        ),
        Scheme("none", FLOATS, ("none",)),
    )
}

ZERO_POINT_DTYPES = {"int4": torch.uint8, "int8": torch.int8}


def get_scheme(name: str) -> Scheme:
    """The descriptor of a scheme; ValueError lists the known names."""
    try:
        return SCHEMES[name]
    except KeyError:
        raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}") from None

"""The layouts of the fp8 backends: the exact inverse, where each weight lies, and what is refused. No GPU needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from samples import overload
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_cases import make_call

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90_w4a8
from torch_moe_ops.backends.sm90 import packed_scales
from torch_moe_ops.backends.sm90 import w4a8_layout as layout
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemas import arguments as schema_arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.numerics import e4m3, w4a8

# rows in all, K, gated; neither rows nor K fill their tiles. Of MXFP4 K becomes the next multiple of 32.
SHAPES = ((192, 208, True), (256, 256, True), (130, 144, False), (64, 128, False))
formats = pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4"))
SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)  # kSignBits of csrc/cuda/sm90/layout/w4a8_layout.h


def random_weight(rows: int, k: int, experts: int = 2) -> tuple[Tensor, Tensor]:
    """Codes, and block scales over the whole range of e4m3, one in eight of them zero."""
    g = torch.Generator().manual_seed(rows + k)
    codes = torch.randint(0, 256, (experts, rows, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 127, (experts, rows, k // 16), generator=g, dtype=torch.uint8)
    scale[torch.rand(scale.shape, generator=g) < 0.125] = 0
    return codes, scale.view(torch.float8_e4m3fn)


def random_mxfp4(rows: int, k: int, experts: int = 2, first: int = 90) -> tuple[Tensor, Tensor]:
    """Codes, and scales over 2^-37 to 2^0 and more; one block in eight has no code but 0 and -0, and any scale."""
    g = torch.Generator().manual_seed(rows + k)
    codes = torch.randint(0, 256, (experts, rows, k // 32, 16), generator=g, dtype=torch.uint8)
    scale = torch.randint(first, 128, (experts, rows, k // 32), generator=g, dtype=torch.uint8)
    empty = torch.rand(scale.shape, generator=g) < 0.125
    codes[empty] &= 0x88
    scale[empty] = torch.randint(0, 161, scale.shape, generator=g, dtype=torch.uint8)[empty]
    return codes.flatten(2), scale


def weight_of(scheme: str, rows: int, k: int, experts: int = 2) -> tuple[Tensor, Tensor]:
    return random_weight(rows, k, experts) if scheme == "nvfp4" else random_mxfp4(rows, -(-k // 32) * 32, experts)


def value_of(scheme: str, field: int) -> float:
    """What the kernel makes of a scale byte (weights_packed.cuh)."""
    if scheme == "mxfp4":
        return 2.0 ** (field // 8 - 5 if field < 128 else 122 - field)
    slow = field // 8 % 16
    relative = field // 8 - 5 if field < 128 else slow - 12 if slow < 7 else slow + 4
    return 0.0 if field == 248 else (8 + field % 8) * 2.0 ** (relative - 3)


def row_of(tile: int, warp: int, h: int, g: int, rows: int, gated: bool) -> int | None:
    """The row of a weight that lies at 16 * warp + 8 * h + g of a tile; None: padding."""
    if gated:
        within = 32 * tile + 8 * warp + g
        return h * (rows // 2) + within if within < rows // 2 else None
    row = 64 * tile + 16 * warp + 2 * g + h
    return row if row < rows else None


@formats
@pytest.mark.parametrize(("rows", "k", "gated"), SHAPES)
def test_unpack_is_the_inverse(scheme: str, rows: int, k: int, gated: bool) -> None:
    codes, scale = weight_of(scheme, rows, k)
    packed = layout.pack(codes, scale, layout.padded_rows(rows, gated), gated, "w")
    back = layout.unpack(*packed, rows, 2 * codes.shape[2], gated, packed_scales.BY_SCHEME[scheme])
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1].view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("first", (0, 20))
@pytest.mark.parametrize(("rows", "k", "gated"), SHAPES)
def test_mxfp4_scales_from_the_smallest_come_back(rows: int, k: int, gated: bool, first: int) -> None:
    """Also rows whose weights are all subnormal in float32, and rows of zeros."""
    codes, scale = random_mxfp4(rows, -(-k // 32) * 32, first=first)
    scale[0, :8] = torch.arange(8, dtype=torch.uint8)[:, None]
    codes[0, 9] = 0
    packed = layout.pack(codes, scale, layout.padded_rows(rows, gated), gated, "w")
    back = layout.unpack(*packed, rows, 2 * codes.shape[2], gated, packed_scales.MXFP4)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scale)


@formats
@pytest.mark.parametrize(("rows", "k", "gated"), SHAPES)
def test_every_weight_lies_where_the_kernel_looks(scheme: str, rows: int, k: int, gated: bool) -> None:
    codes, scale = weight_of(scheme, rows, k, experts=1)
    k, kind = 2 * codes.shape[2], packed_scales.BY_SCHEME[scheme]
    shared = kind.block // 16  # neighbouring threads that have the same blocks
    padded = layout.padded_rows(rows, gated)
    packed, strip = layout.pack(codes, scale, padded, gated, "w")
    folded, scales = layout.fold(codes, scale, padded, gated, "w")
    rounded, x = w4a8.round_weights(codes, scale)
    of_byte = rounded.view(torch.uint8)[0]
    nibbles = torch.stack([codes[0] & 15, codes[0] >> 4], -1).flatten(1)
    words = packed.view(torch.int32).long() & 0xFFFFFFFF
    g = torch.Generator().manual_seed(1)
    for tile, k_tile, place, at in zip(
        *(torch.randint(0, n, (3000,), generator=g).tolist() for n in (*packed.shape[1:3], 64, 128)), strict=True
    ):
        warp, h, row8 = place // 16, place // 8 % 2, place % 8
        step, u, c, b = at // 32, at // 16 % 2, at // 4 % 4, at % 4
        thread, i = 32 * warp + 4 * row8 + c, 4 * u + b
        word = int(words[0, tile, k_tile, 512 * (step // 2) + 4 * thread + 2 * (step % 2) + h])
        code = (word >> 4 * i & 7) | (word >> SIGN_BITS[i] & 1) << 3
        byte = int(folded[0, tile, k_tile, 128 * place + 16 * (at // 16 ^ place % 8) + at % 16])
        row, column = (
            row_of(tile, warp, h, row8, rows, gated),
            128 * k_tile + 64 * (step // 2) + 16 * c + 8 * (step % 2) + i,
        )
        if row is None or column >= k:
            assert (code, byte) == (0, 0)
            continue
        assert (code, byte) == (int(nibbles[row, column]), int(of_byte[row, column]))
        assert int(strip[0, tile, place - 64]) == int(x[0, row]) + kind.exponent_bias
        padding = h * (padded - rows) // 2 if gated else 0
        assert float(scales[0, row + padding]) == 2.0 ** int(x[0, row])
        field = int(strip[0, tile, kind.tile_bytes * k_tile + 4 * (thread // shared) + 2 * (step // 2) + h])
        given = scale[0, row, column // kind.block]
        if scheme == "nvfp4":
            assert value_of(scheme, field) == float(e4m3.decode(given)) * 2.0 ** -int(x[0, row])
        elif code & 7:
            assert value_of(scheme, field) == 2.0 ** (int(given) - 127 - int(x[0, row]))


def test_tables_of_quick_scales_need_no_rounding_but_the_one_of_one_and_a_half() -> None:
    """What the kernel computes instead of products: doubling adds 8 to a code, 1.5 * (1 + m / 8) adds 4 or 5 to m."""
    for field in range(128):
        scale = torch.tensor((8 + field % 8) * 2.0 ** (field // 8 - 8))
        magnitudes = scale * torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        known = magnitudes <= e4m3.MAX
        one = field + 16
        half_more = one + 4 + (1 <= field % 8 <= 5)
        table = torch.tensor([one - 8, one, half_more, one + 8, half_more + 8, one + 16, half_more + 16])
        assert torch.equal(e4m3.encode(magnitudes).view(torch.uint8)[known].long(), table[known])


@formats
@pytest.mark.parametrize("policy", ("packed", "folded"))
def test_prepare_makes_what_the_layout_says(policy: str, scheme: str) -> None:
    backend = BACKENDS[f"cuda_sm90_{policy}"]
    g = torch.Generator().manual_seed(0)
    hidden, inter = (144, 80) if scheme == "nvfp4" else (160, 96)
    w13, w2 = torch.randn(3, 2 * inter, hidden, generator=g), torch.randn(3, hidden, inter, generator=g)
    raw = moe.quantize_experts(w13, w2, scheme)
    prepared = backend.prepare(raw)
    sizes = Sizes(3, hidden, inter, True, torch.uint8)
    for name, (shapes, dtypes) in backend.layout.specs(SCHEMES[scheme], sizes).items():
        assert tuple(prepared[name].shape) in shapes and prepared[name].dtype in dtypes
    assert backend.layout.intermediate_size(SCHEMES[scheme], tuple(prepared["w2"].shape)) == 128
    if policy == "folded":
        with pytest.raises(ValueError, match="the codes and block scales that they were made of are gone"):
            backend.restore(SCHEMES[scheme], prepared, sizes)
        return
    for name, tensor in backend.restore(SCHEMES[scheme], prepared, sizes).items():
        assert torch.equal(tensor.view(torch.uint8), getattr(raw, name).view(torch.uint8))


@pytest.mark.parametrize("lay", (layout.pack, layout.fold))
@pytest.mark.parametrize("bits", (0x7F, 0x80, 0xB8))
def test_scales_without_a_byte_are_refused(lay: object, bits: int) -> None:
    codes, scale = random_weight(64, 128)
    scale.view(torch.uint8)[1, 3, 2] = bits
    with pytest.raises(ValueError, match=f"w2_scale must hold positive finite scales or zero .*{bits:#x} in expert 1"):
        lay(codes, scale, 64, False, "w2_scale")  # type: ignore[operator]


@pytest.mark.parametrize("lay", (layout.pack, layout.fold))
@pytest.mark.parametrize("bits", (161, 254, 255))
def test_exponents_that_no_kernel_takes_are_refused(lay: object, bits: int) -> None:
    codes, scale = random_mxfp4(64, 128)
    scale[1, 3, 2] = bits
    with pytest.raises(ValueError, match=f"w2_scale must hold exponents of at most 2\\^33 .*{bits:#x} in expert 1"):
        lay(codes, scale, 64, False, "w2_scale")  # type: ignore[operator]


def test_a_scale_out_of_reach_of_its_row_is_refused() -> None:
    """The row's own unit is 2^13: 2^-120 is the smallest that has a byte. Beside zeros any scale comes back."""
    codes, scale = torch.zeros(1, 64, 64, dtype=torch.uint8), torch.full((1, 64, 4), 7, dtype=torch.uint8)
    codes[0, 5, 0], codes[0, 5, 16], scale[0, 5, 0] = 7, 1, 127 + 13 + 6
    packed = layout.pack(codes, scale, 64, False, "w2_scale")
    assert torch.equal(layout.unpack(*packed, 64, 128, False, packed_scales.MXFP4)[1], scale)
    scale[0, 5, 1:] = 6
    with pytest.raises(
        ValueError, match=r"w2_scale must not hold a scale below 2\^-133 times 2\^x of its row .*expert 0"
    ):
        layout.pack(codes, scale, 64, False, "w2_scale")


@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4"))
def test_explain_names_bits_of_a_weight(scheme: str) -> None:
    bits = {"nvfp4": "4.5", "mxfp4": "4.25"}
    problem = moe.Problem(scheme, act_format="fp8", weight_policy="packed")
    for name, most in (("cuda_sm90_packed", bits[scheme]), ("cuda_sm90_folded", "8")):
        assert str(BACKENDS[name].notes(problem)).endswith(f", {most} bits a weight")


def test_a_scale_far_above_its_row_is_refused() -> None:
    codes, scale = torch.zeros(1, 64, 64, dtype=torch.uint8), torch.zeros(1, 64, 8)
    codes[0, 5, 0], scale[0, 5, 0], scale[0, 5, 1] = 1, 2.0**-9, 2.0**8
    with pytest.raises(ValueError, match="w2_scale must not hold a scale 2\\^19 times its row's weights"):
        layout.pack(codes, scale.to(torch.float8_e4m3fn), 64, False, "w2_scale")


def test_explain_names_the_policy() -> None:
    problem = moe.Problem("nvfp4", act_format="fp8", device="cuda", capability=(9, 0), weight_policy="folded")
    against = moe.explain(problem).against
    assert "weight_policy must be one of ['packed'], got 'folded'" in against["cuda_sm90_packed"]
    assert not [reason for reason in against["cuda_sm90_folded"] if "weight_policy" in reason]


@pytest.mark.parametrize(("rows", "k", "gated"), SHAPES)
def test_fp8_tiles_are_those_of_folded_weights_and_come_back(rows: int, k: int, gated: bool) -> None:
    codes, scale = random_weight(rows, k)
    padded = layout.padded_rows(rows, gated)
    rounded, _ = w4a8.round_weights(codes, scale)
    tiles = layout.tile_fp8(rounded, padded, gated, "w")
    assert torch.equal(tiles, layout.fold(codes, scale, padded, gated, "w")[0])
    back = layout.untile_fp8(tiles, rows, k, gated)
    assert torch.equal(back.view(torch.uint8), rounded.view(torch.uint8))


@pytest.mark.parametrize("scheme", ("fp8", "fp8_block"))
@pytest.mark.parametrize("kind", ("channel", "half", "tensor"))
@pytest.mark.parametrize("gated", (True, False))
def test_fp8_weights_and_scales_of_every_kind_come_back(scheme: str, kind: str, gated: bool) -> None:
    g = torch.Generator().manual_seed(4)
    halves = 2 if gated else 1
    raw = moe.quantize_experts(
        torch.randn(3, halves * 80, 144, generator=g), torch.randn(3, 144, 80, generator=g), scheme
    )
    if scheme == "fp8":
        columns = {"channel": (halves * 80, 1), "half": (halves,), "tensor": (1,)}[kind]
        w13_scale = torch.rand(3, *columns, generator=g) + 0.5
        w2_scale = torch.rand(3, *((144, 1) if kind == "channel" else (1,)), generator=g) + 0.5
        raw = dataclasses.replace(raw, w13_scale=w13_scale, w2_scale=w2_scale)
    backend = BACKENDS["cuda_sm90_fp8"]
    prepared = backend.prepare(raw)
    for inter in (80, 128):  # as the caller knows it, and as the shape of w2 says
        sizes = Sizes(3, 144, inter, gated, torch.float8_e4m3fn)
        for name, (shapes, dtypes) in backend.layout.specs(SCHEMES[scheme], sizes).items():
            assert tuple(prepared[name].shape) in shapes and prepared[name].dtype in dtypes
    restored = backend.restore(SCHEMES[scheme], prepared, Sizes(3, 144, 80, gated, torch.float8_e4m3fn))
    for name, tensor in restored.items():
        given = getattr(raw, name).contiguous()
        assert tensor.shape == given.shape and torch.equal(tensor.view(torch.uint8), given.view(torch.uint8))


@pytest.mark.parametrize(
    ("scheme", "name", "policy"),
    (
        ("fp8", "cuda_sm90_fp8", "exact"),
        ("fp8_block", "cuda_sm90_fp8", "exact"),
        ("nvfp4", "cuda_sm90_packed", "packed"),
        ("nvfp4", "cuda_sm90_folded", "folded"),
        ("mxfp4", "cuda_sm90_packed", "packed"),
        ("mxfp4", "cuda_sm90_folded", "folded"),
    ),
)
@pytest.mark.parametrize("inter", (80, 128))
def test_the_op_takes_what_prepare_makes(scheme: str, name: str, policy: str, inter: int) -> None:
    """Its checks, which run without a GPU where tensors are fake."""
    g = torch.Generator().manual_seed(5)
    hidden = 160 if scheme == "mxfp4" else 144
    inter += 16 if scheme == "mxfp4" and inter % 32 else 0
    raw = moe.quantize_experts(torch.randn(3, 2 * inter, hidden, generator=g), torch.randn(3, hidden, inter), scheme)
    given = BACKENDS[name].prepare(raw)
    if scheme == "nvfp4":
        given |= {"g1_alphas": torch.ones(3, 2), "g2_alphas": torch.ones(3)}
    given |= {"hidden_states": torch.zeros(5, hidden, dtype=torch.bfloat16), "topk_weights": torch.zeros(5, 2)}
    given["topk_ids"] = torch.zeros(5, 2, dtype=torch.int32)
    arguments, _ = schema_arguments(f"{scheme}_moe_routed")
    with FakeTensorMode() as mode:
        tensors = {key: mode.from_tensor(tensor) for key, tensor in given.items()}
        positional = [tensors.get(key) for key in arguments[: arguments.index("backend")]]
        out = overload(f"{scheme}_moe_routed")(*positional, backend=name, act_format="fp8", weight_policy=policy)
    assert out.shape == (5, hidden) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ("fp8", "fp8_block"))
@pytest.mark.parametrize("bits", (0x7F, 0xFF))
def test_weights_that_are_nan_are_refused(scheme: str, bits: int) -> None:
    raw = moe.quantize_experts(torch.randn(3, 160, 144), torch.randn(3, 144, 80), scheme)
    raw.w2.view(torch.uint8)[1, 5, 7] = bits
    with pytest.raises(ValueError, match=r"w2 must hold no NaN .*got one in expert 1"):
        BACKENDS["cuda_sm90_fp8"].prepare(raw)


@pytest.mark.parametrize(
    ("scheme", "hidden", "inter", "top_k", "most"),
    (
        ("nvfp4", 2048, 768, 8, 8),
        ("mxfp4", 2048, 1024, 8, 6),
        ("nvfp4", 256, 128, 2, 12),
        ("nvfp4", 4096, 1408, 8, 4),
        ("mxfp4", 7168, 2048, 8, 2),
        ("nvfp4", 4096, 14336, 2, 1),
        ("mxfp4", 2880, 2880, 4, 0),
        ("nvfp4", 2048, 2032, 8, 5),  # padded to a large one
    ),
)
def test_packed_takes_the_faster_kernel_and_says_which(
    scheme: str, hidden: int, inter: int, top_k: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = moe.Problem(
        scheme, "fp8", weight_policy="packed", device="cuda", capability=(9, 0), num_experts=64, hidden_size=hidden,
        intermediate_size=inter, top_k=top_k,
    )  # fmt: skip
    kernels = f"decode kernel up to {most} tokens, " if most else "prefill kernels on fp8 tensor cores, "
    assert moe.explain(problem).notes["cuda_sm90_packed"].startswith(kernels)
    unknown = dataclasses.replace(problem, top_k=None)
    assert (
        moe.explain(unknown).notes["cuda_sm90_packed"].startswith("decode kernel for few tokens, " if most else kernels)
    )
    asked: list[int] = []
    monkeypatch.setattr(cuda_sm90_w4a8, "run", lambda weights, call, out, decode_tokens: asked.append(decode_tokens))
    shape = cuda_sm90_w4a8.specs(False, SCHEMES[scheme], Sizes(4, hidden, inter, True, torch.bfloat16))["w2"][0][0]
    w2 = torch.empty(shape, dtype=torch.uint8, device="meta")
    x, ids = torch.empty(1, hidden, device="meta"), torch.empty(1, top_k, dtype=torch.int32, device="meta")
    call = make_call(scheme, "fp8", experts=4)._replace(w2=w2, hidden_states=x, topk_ids=ids)
    BACKENDS["cuda_sm90_packed"].run(call, torch.empty(0))
    assert asked == [most]

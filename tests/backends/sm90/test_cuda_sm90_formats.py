"""Every format of the Hopper kernels' layout: prepare and restore, bit for bit, and the kernels' decoders, run here."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch
from host_library import host_library
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.weights.shared_scales import int4_scales_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# scheme, values of K that share an int4 scale (0: a row), dtype of int4 scales, zero points
FORMATS = (
    ("nvfp4", 16, BF16, False),
    ("mxfp4", 32, BF16, False),
    ("mxint4", 32, BF16, False),
    ("int4", 32, BF16, False),
    *(("int4", group, BF16, False) for group in (64, 128, 0)),
    *(
        ("int4", group, dtype, zero)
        for group in (64, 128, 0)
        for dtype, zero in ((F16, False), (F16, True), (BF16, True), (F32, False), (F32, True))
    ),
    *(("int4", 32, dtype, zero) for dtype, zero in ((F16, False), (F16, True), (BF16, True))),
)
# hidden, intermediate size: neither fills its tiles, both do, K of 45 tiles, and two that no group but a row divides.
SIZES = ((128, 160), (256, 384), (2880, 96), (192, 80), (64, 48))


def fits(scheme: str, group: int, hidden: int, inter: int) -> bool:
    unit = group or SCHEMES[scheme].size_multiple
    return hidden % unit == 0 and inter % unit == 0


CASES = [(*f, *s) for f in FORMATS for s in SIZES if fits(f[0], f[1], *s)]


def make_layer(
    scheme: str, group: int, dtype: torch.dtype, zero: bool, hidden: int, inter: int, gated: bool = True
) -> moe.RawWeights:
    """Every code, and scales over the whole range that the layout holds."""
    g = torch.Generator().manual_seed(hidden + inter)
    experts, fields = 2, dict[str, Any]()
    for name, n, k in (("w13", (2 if gated else 1) * inter, hidden), ("w2", hidden, inter)):
        if scheme in ("mxint4", "int4"):
            shape = (experts, n, k // (group or k))
            fields[name] = torch.randint(-(2**31), 2**31, (experts, n, k // 8), generator=g).int()
            exponents = torch.randint(-24, 13, shape, generator=g)
            fields[f"{name}_scale"] = (torch.randn(shape, generator=g) * torch.exp2(exponents.float())).to(dtype)
            if zero:
                fields[f"{name}_zero_point"] = torch.randint(0, 16, shape, generator=g, dtype=torch.uint8)
            continue
        largest = 127 if scheme == "nvfp4" else 161
        fields[name] = torch.randint(0, 256, (experts, n, k // 2), generator=g, dtype=torch.uint8)
        scale = torch.randint(0, largest, (experts, n, k // group), generator=g, dtype=torch.uint8)
        fields[f"{name}_scale"] = scale.view(torch.float8_e4m3fn) if scheme == "nvfp4" else scale
    if scheme == "nvfp4":
        fields |= {"w13_scale_2": torch.ones(experts, 1), "w2_scale_2": torch.ones(experts)}
    return moe.RawWeights(scheme=scheme, activation="silu" if gated else "relu2_no_mul", **fields)


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize(("scheme", "group", "dtype", "zero", "hidden", "inter"), CASES)
def test_restore_is_the_inverse(
    scheme: str, group: int, dtype: torch.dtype, zero: bool, hidden: int, inter: int, gated: bool
) -> None:
    raw = make_layer(scheme, group, dtype, zero, hidden, inter, gated)
    sizes = Sizes(raw.num_experts, hidden, inter, gated, torch.uint8)
    prepared = cuda_sm90.prepare(raw)
    for name, (shapes, dtypes) in cuda_sm90.specs(SCHEMES[scheme], sizes).items():
        assert tuple(prepared[name].shape) in shapes and prepared[name].dtype in dtypes
    restored = cuda_sm90.restore(SCHEMES[scheme], prepared, sizes)
    given = {name: t for name, t in raw.tensors().items() if not name.endswith("_2")}
    assert restored.keys() == given.keys()
    for name, tensor in restored.items():
        assert tensor.dtype == given[name].dtype and tensor.shape == given[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8)), name


@pytest.mark.parametrize(("scheme", "group", "dtype", "zero"), FORMATS)
def test_the_op_takes_what_prepare_makes(scheme: str, group: int, dtype: torch.dtype, zero: bool) -> None:
    raw = make_layer(scheme, group, dtype, zero, 256, 128)
    name = "cuda_sm90" if scheme in cuda_sm90.FORMATS else "cuda_sm90_int4"
    alphas = {"g1_alphas": torch.ones(2), "g2_alphas": torch.ones(2)} if scheme == "nvfp4" else {}
    prepared = cuda_sm90.prepare(raw) | alphas
    with FakeTensorMode() as mode:
        weights = {key: mode.from_tensor(tensor) for key, tensor in prepared.items()}
        x, ids, factors = torch.empty(5, 256, dtype=BF16), torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 2)
        fields: dict[str, Any] = {"hidden_states_scale": None, "w13_bias": None, "w2_bias": None}
        if SCHEMES[scheme].static_acts:
            fields |= {"a1_gscale": None, "a2_gscale": None}
        if SCHEMES[scheme].has_zero_point:
            fields |= {"w13_zero_point": None, "w2_zero_point": None}
        given = {"hidden_states": x, "topk_ids": ids, "topk_weights": factors, "backend": name, "act_format": "none"}
        out = getattr(torch.ops.moeq, f"{scheme}_moe_routed")(**given, **weights, **fields)
    assert out.shape == (5, 256) and out.dtype == BF16


@pytest.mark.parametrize(
    ("scheme", "hidden", "inter"), [("int4", 96, 64), ("mxint4", 96, 64), ("nvfp4", 96, 64), ("fp8_block", 256, 128)]
)
def test_sizes_that_are_traced_as_symbols(scheme: str, hidden: int, inter: int) -> None:
    """As torch.compile(dynamic=True) has them. A layer's own sizes become numbers, that of tokens stays."""
    name = "cuda_sm90_int4" if scheme in ("int4", "mxint4") else "cuda_sm90"
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(4, 2 * inter, hidden, generator=g), torch.randn(4, hidden, inter, generator=g)
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), scheme)
    alphas = {"g1_alphas": torch.ones(4), "g2_alphas": torch.ones(4)} if scheme == "nvfp4" else {}
    prepared = cuda_sm90.prepare(raw) | alphas
    fields: dict[str, Any] = {"hidden_states_scale": None, "w13_bias": None, "w2_bias": None}
    fields |= {"a1_gscale": None, "a2_gscale": None} if SCHEMES[scheme].static_acts else {}
    fields |= {"w13_zero_point": None, "w2_zero_point": None} if SCHEMES[scheme].has_zero_point else {}

    def layer(x: Tensor, ids: Tensor, factors: Tensor, weights: dict[str, Tensor]) -> Tensor:
        given = {"hidden_states": x, "topk_ids": ids, "topk_weights": factors, "backend": name, "act_format": "none"}
        out: Tensor = getattr(torch.ops.moeq, f"{scheme}_moe_routed")(**given, **weights, **fields)
        shapes.append(out.shape)
        return out

    shapes: list[torch.Size] = []
    x, ids, factors = torch.empty(5, hidden, dtype=BF16), torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 2)
    make_fx(layer, tracing_mode="symbolic")(x, ids, factors, prepared)
    assert isinstance(shapes[0][0], torch.SymInt) and shapes[0][1] == hidden


def test_scales_of_two_forms_are_refused() -> None:
    """By the op, which names both, not by the kernels."""
    raw = make_layer("int4", 64, BF16, False, 256, 128, True)
    prepared = cuda_sm90.prepare(raw)
    prepared["w13_scale"] = prepared["w13_scale"].to(torch.int32)
    with FakeTensorMode() as mode:
        weights = {key: mode.from_tensor(tensor) for key, tensor in prepared.items()}
        x, ids, factors = torch.empty(5, 256, dtype=BF16), torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 2)
        fields = dict.fromkeys(("hidden_states_scale", "w13_bias", "w2_bias", "w13_zero_point", "w2_zero_point"))
        with pytest.raises(
            RuntimeError, match=r"w13_scale must have dtype torch.bfloat16 like w2_scale .*got torch.int32"
        ):
            torch.ops.moeq.int4_moe_routed(
                hidden_states=x, topk_ids=ids, topk_weights=factors, backend="cuda_sm90_int4", act_format="none",
                **weights, **fields,
            )  # fmt: skip


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_library("sm90_decode_host.cpp", tmp_path_factory.mktemp("host"))


def decoder_of(scheme: str, scale: Tensor) -> str:
    if scheme in ("nvfp4", "mxfp4"):
        return f"decode_{scheme}"
    if scale.dtype == torch.int32:
        return "decode_int4_zero_per_32" if scale.shape[-1] == 128 else "decode_int4_zero"
    if scale.dtype == torch.int64:
        return "decode_int4_float" if scale.shape[-1] == 64 else "decode_int4_zero_bf16"
    return f"decode_int4_per_{32 if scale.shape[-1] == 128 else 64}"


def decode(
    decoders: ctypes.CDLL, scheme: str, codes: Tensor, scale: Tensor, decoder: str = "", dtype: torch.dtype = BF16
) -> Tensor:
    """What the kernels multiply, operands of a dtype: float64 [E, stored rows, padded K] from prepared tensors."""
    function = decoders[decoder or decoder_of(scheme, scale)]
    function.restype = ctypes.c_float
    experts, row_tiles, k_tiles = codes.shape[:3]
    # A group's tile is stored once and repeated: the shape says so, the kernels see the repeats.
    out = torch.empty(experts, row_tiles, k_tiles, 64, 64, dtype=dtype)
    count = ctypes.c_int64(experts * row_tiles * k_tiles)
    assert codes.is_contiguous() and scale.is_contiguous()
    factor = function(*(ctypes.c_void_p(t.data_ptr()) for t in (codes, scale)), count, ctypes.c_void_p(out.data_ptr()))
    return (out.double() * factor).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def natural_rows(stored: Tensor, gated: bool) -> Tensor:
    """[E, halves, padded rows of a half, K]: where gated, row 16 q + g is gate row 8 q + g, + 8 the up row."""
    if not gated:
        return stored[:, None]
    return stored.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(2, 3)


def near(decoded: Tensor, weight: Tensor) -> bool:
    """Whether each is the nearest bfloat16, but where a weight is within 2^-15 of itself from the middle of two."""
    far = [(bound * weight.double()).to(torch.bfloat16).double() for bound in (1 - 2.0**-15, 1, 1 + 2.0**-15)]
    assert (decoded == far[1]).double().mean() > 0.98
    return bool(((decoded == far[0]) | (decoded == far[1]) | (decoded == far[2])).all())


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize(("scheme", "group", "dtype", "zero", "hidden", "inter"), CASES)
def test_decoders_round_each_weight_once(
    decoders: ctypes.CDLL,
    scheme: str,
    group: int,
    dtype: torch.dtype,
    zero: bool,
    hidden: int,
    inter: int,
    gated: bool,
) -> None:
    raw = make_layer(scheme, group, dtype, zero, hidden, inter, gated)
    prepared = cuda_sm90.prepare(raw)
    # Products of codes and scales are exact in float32; e2m1 formats lose nothing in bfloat16 either.
    for name, weight in zip(("w13", "w2"), moe.dequantize_experts(raw), strict=True):
        stored = decode(decoders, scheme, prepared[name], prepared[f"{name}_scale"])
        halves = natural_rows(stored, gated and name == "w13")
        rows = weight.shape[1] // halves.shape[1]
        decoded = halves[:, :, :rows, : weight.shape[2]].flatten(1, 2)
        rounded = weight.to(torch.bfloat16).double()
        if scheme in ("nvfp4", "mxfp4"):
            assert torch.equal(rounded.float(), weight)
        if scheme == "nvfp4":  # a block scale of zero is stored as 2^-23
            assert (decoded - rounded).abs()[rounded == 0].max() <= 6 * 2.0**-23
            decoded = torch.where(rounded == 0, rounded, decoded)
        if scheme == "mxfp4":  # down to 2^-93; below, operands are subnormal
            normal = weight.abs() >= 2.0**-94
            assert torch.equal(decoded[normal], rounded[normal]) and (decoded - rounded).abs().max() <= 2.0**-102
        elif dtype == F32:  # a scale has sixteen bits
            assert near(decoded, weight)
        else:
            assert torch.equal(decoded, rounded)
        if not zero:  # what no token meets is zero all the same
            assert not halves[:, :, rows:].any() and not halves[:, :, :, weight.shape[2] :].any()


@pytest.mark.parametrize("gated", (True, False))
def test_nvfp4_is_exact_in_float16(decoders: ctypes.CDLL, gated: bool) -> None:
    """Products of all codes and scales, those of zero and subnormal scales among them."""
    g = torch.Generator().manual_seed(0)
    halves, inter = (2, 64) if gated else (1, 128)

    def random(*shape: int, upto: int) -> Tensor:
        return torch.randint(upto, shape, generator=g, dtype=torch.uint8)

    raw = moe.RawWeights(
        "nvfp4",
        w13=random(4, 128, 64, upto=255),
        w2=random(4, 128, inter // 2, upto=255),
        w13_scale=random(4, 128, 8, upto=127).view(torch.float8_e4m3fn),
        w2_scale=random(4, 128, inter // 16, upto=127).view(torch.float8_e4m3fn),
        w13_scale_2=torch.ones(4, halves),
        w2_scale_2=torch.ones(4),
        activation="silu" if gated else "relu2_no_mul",
    )
    assert raw.w13_scale is not None and raw.w13_scale.view(torch.uint8).unique().numel() == 127
    prepared = cuda_sm90.prepare(raw)
    for name, weight in zip(("w13", "w2"), moe.dequantize_experts(raw), strict=True):
        stored = decode(decoders, "nvfp4", prepared[name], prepared[f"{name}_scale"], "decode_nvfp4_half", F16)
        halves = natural_rows(stored, gated and name == "w13")
        rows = weight.shape[1] // halves.shape[1]
        assert torch.equal(halves[:, :, :rows, : weight.shape[2]].flatten(1, 2), weight.double())
        assert not halves[:, :, rows:].any() and not halves[:, :, :, weight.shape[2] :].any()


def exact_weight(raw: moe.RawWeights, name: str) -> Tensor:
    """float64 [E, N, K]: what float32 rounds where scales are float32."""
    words, scale, zero = (getattr(raw, f"{name}{end}") for end in ("", "_scale", "_zero_point"))
    codes = ((words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(2).double()
    each = codes.shape[2] // scale.shape[2]
    points = 8.0 if zero is None else zero.double().repeat_interleave(each, 2)
    found: Tensor = (codes - points) * scale.double().repeat_interleave(each, 2)
    return found


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize(
    ("scheme", "group", "dtype", "zero", "hidden", "inter"), [c for c in CASES if c[1] != 32 and (c[3] or c[2] != BF16)]
)
def test_sums_of_a_tile_need_its_rows_scales_alone(
    decoders: ctypes.CDLL, scheme: str, group: int, dtype: torch.dtype, zero: bool, hidden: int, inter: int, gated: bool
) -> None:
    """What the decode kernels multiply: numbers with no more bits than a code, times float32 factors, exactly."""
    raw = make_layer(scheme, group, dtype, zero, hidden, inter, gated)
    prepared = cuda_sm90.prepare(raw)
    for name, weight in zip(("w13", "w2"), moe.dequantize_experts(raw), strict=True):
        codes, scale = prepared[name], prepared[f"{name}_scale"]
        kind = "int4_float_sums" if dtype == F32 else "int4_sums"
        differences = decode(decoders, scheme, codes, scale, f"decode_{kind}")
        experts, row_tiles, k_tiles = codes.shape[:3]
        factors = torch.empty(experts, row_tiles, k_tiles, 64)
        count = ctypes.c_int64(experts * row_tiles * k_tiles)
        decoders[f"{kind}_factors"](ctypes.c_void_p(scale.data_ptr()), count, ctypes.c_void_p(factors.data_ptr()))
        of_rows = factors.double().transpose(2, 3).flatten(1, 2)  # [E, stored rows, K tiles]
        stored = differences * of_rows.repeat_interleave(64, 2)
        halves = natural_rows(stored, gated and name == "w13")
        rows = weight.shape[1] // halves.shape[1]
        assert torch.equal(halves[:, :, :rows, : weight.shape[2]].flatten(1, 2), exact_weight(raw, name))
        # Both are numbers that tensor cores and float32 keep, not subnormal ones.
        assert differences[differences != 0].abs().min() >= 2.0**-126 / 2.0**40


@pytest.mark.parametrize(
    ("dtype", "zero", "stored"),
    (
        (BF16, False, torch.bfloat16),
        (BF16, True, torch.int64),
        (F16, False, torch.int32),
        (F16, True, torch.int32),
        (F32, False, torch.int64),
    ),
)
def test_zero_points_beside_bfloat16_scales_have_a_form_of_their_own(
    dtype: torch.dtype, zero: bool, stored: torch.dtype
) -> None:
    raw = make_layer("int4", 64, dtype, zero, 128, 128)
    assert {cuda_sm90.prepare(raw)[f"{name}_scale"].dtype for name in ("w13", "w2")} == {stored}
    if dtype == BF16 and zero:  # beside scales that need more they take the form of those
        other = make_layer("int4", 64, F16, False, 128, 128)
        mixed = dataclasses.replace(raw, w2_scale=other.w2_scale, w2_zero_point=None)
        assert {cuda_sm90.prepare(mixed)[f"{name}_scale"].dtype for name in ("w13", "w2")} == {torch.int32}


@pytest.mark.parametrize("others", ("float16 per 64", "bfloat16 per 128 with zero points"))
def test_float32_scales_beside_others(others: str) -> None:
    """Both weights have one form, and come back as they were."""
    dtype, group = (F16, 64) if others.startswith("float16") else (BF16, 128)
    raw, other = (
        make_layer("int4", g, d, z, 128, 128) for g, d, z in ((128, F32, False), (group, dtype, "zero" in others))
    )
    mixed = dataclasses.replace(raw, w2_scale=other.w2_scale, w2_zero_point=other.w2_zero_point)
    assert int4_scales_of(mixed) == f"float32 per row, {others.replace('128', 'row')}"
    prepared = cuda_sm90.prepare(mixed)
    assert {prepared[f"{name}_scale"].dtype for name in ("w13", "w2")} == {torch.int64}
    restored = cuda_sm90.restore(SCHEMES["int4"], prepared, Sizes(2, 128, 128, True, torch.uint8))
    assert restored.keys() == mixed.tensors().keys()
    assert all(
        torch.equal(restored[name], t) and restored[name].dtype == t.dtype for name, t in mixed.tensors().items()
    )


@pytest.mark.parametrize("group", (32, 64))
@pytest.mark.parametrize("dtype", (BF16, F16))
def test_every_code_with_every_zero_point(decoders: ctypes.CDLL, dtype: torch.dtype, group: int) -> None:
    raw = make_layer("int4", group, dtype, True, 1024, 64)
    codes = torch.arange(16).repeat(4).view(8, 8) << torch.arange(0, 32, 4)
    words = codes.sum(1).to(torch.int64)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    raw.w13.copy_(words.repeat(raw.w13.shape[2] // 8).expand_as(raw.w13))
    assert raw.w13_zero_point is not None and raw.w13_scale is not None
    raw.w13_zero_point.copy_((torch.arange(1024 // group) % 16).expand_as(raw.w13_zero_point))
    expected = moe.dequantize_experts(raw)[0].to(torch.bfloat16).double()
    prepared = cuda_sm90.prepare(raw)
    stored = decode(decoders, "int4", prepared["w13"], prepared["w13_scale"])
    assert torch.equal(natural_rows(stored, True).flatten(1, 2), expected)


@pytest.mark.parametrize("scale", (0.0, -0.0, 2.0**-133, -(2.0**-126), 65280.0, -65280.0, 2.0**-24))
@pytest.mark.parametrize(("dtype", "group"), ((BF16, 64), (F16, 64), (F32, 64), (F16, 32)))
def test_extreme_scales_of_int4_come_back(scale: float, dtype: torch.dtype, group: int) -> None:
    raw = make_layer("int4", group, dtype, False, 64, 64)
    assert raw.w13_scale is not None
    raw.w13_scale[1] = scale
    sizes = Sizes(2, 64, 64, True, torch.uint8)
    back = cuda_sm90.restore(SCHEMES["int4"], cuda_sm90.prepare(raw), sizes)["w13_scale"]
    assert torch.equal(back.view(torch.uint8), raw.w13_scale.view(torch.uint8))


@pytest.mark.parametrize(
    ("scheme", "value", "text"),
    (
        ("mxfp4", 255, "w2_scale must hold exponents of at most 2\\^33 .*got code 0xff in expert 1"),
        ("mxfp4", 161, "got code 0xa1 in expert 1"),
        ("mxint4", float("nan"), "w2_scale must hold finite scales of at most 65280, got nan in expert 1"),
        ("int4", float("inf"), "got inf in expert 1"),
        ("int4", -65536.0, "got -65536.0 in expert 1"),
    ),
)
def test_scales_that_do_not_fit_are_refused(scheme: str, value: float, text: str) -> None:
    raw = make_layer(scheme, 32, BF16, False, 64, 64)
    assert raw.w2_scale is not None
    raw.w2_scale[1, 3, 1] = value
    with pytest.raises(ValueError, match=text):
        cuda_sm90.prepare(raw)


@pytest.mark.parametrize(
    ("group", "dtype", "zero", "kind"),
    ((32, F32, False, "float32 per 32"), (32, F32, True, "float32 per 32 with zero points")),
)
def test_int4_scales_without_a_form_are_a_reason(group: int, dtype: torch.dtype, zero: bool, kind: str) -> None:
    raw = make_layer("int4", group, dtype, zero, 256, 256)
    assert int4_scales_of(raw) == kind
    problem = moe.Problem("int4", hidden_size=256, intermediate_size=256, weight_scales=kind)
    reasons = [reason for reason in BACKENDS["cuda_sm90"].reasons(problem) if "scales of int4" in reason]
    assert len(reasons) == 1 and reasons[0].endswith(f"got {kind}")
    with pytest.raises(ValueError, match=f"scales of int4 weights must .* got {kind}"):
        cuda_sm90.prepare(raw)
    for kinds in (
        "bfloat16 per 128, float16 per row with zero points",
        "float32 per 64 with zero points",
        "bfloat16 per 32, float16 per 32 with zero points",
    ):
        fitting = dataclasses.replace(problem, weight_scales=kinds)
        assert not any("scales of int4" in reason for reason in BACKENDS["cuda_sm90"].reasons(fitting))


@pytest.mark.parametrize(
    ("kinds", "text"),
    (
        ("bfloat16 per 128", "weights are rounded to bfloat16; "),
        ("bfloat16 per 32", "weights are rounded to bfloat16; "),
        ("bfloat16 per 64 with zero points", "weights are rounded to bfloat16, but not by decode; "),
        ("bfloat16 per 128, float16 per row", "weights are rounded to bfloat16, but not by decode and slim; "),
        ("float32 per 128", "weights are rounded to bfloat16, but not by decode and slim; "),
        ("float16 per 32 with zero points", "weights are rounded to bfloat16; "),
    ),
)
def test_explain_says_which_kernels_round(kinds: str, text: str) -> None:
    problem = moe.Problem("int4", hidden_size=256, intermediate_size=256, num_experts=8, weight_scales=kinds)
    notes = BACKENDS["cuda_sm90_int4"].notes
    assert notes is not None and notes(problem).startswith(text)


def test_groups_of_32_and_a_row_do_not_mix() -> None:
    raw = make_layer("int4", 32, BF16, False, 128, 128)
    other = make_layer("int4", 0, BF16, False, 128, 128)
    with pytest.raises(ValueError, match="got bfloat16 per 32, bfloat16 per row"):
        cuda_sm90.prepare(dataclasses.replace(raw, w2_scale=other.w2_scale))

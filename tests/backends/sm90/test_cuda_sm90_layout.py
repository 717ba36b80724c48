"""The layout of the Hopper kernels: prepare and restore, bit for bit, and against a decoder made from its text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90
from torch_moe_ops.backends.sm90 import layout, scales
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.numerics import nvfp4
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.problem import settings_of
from torch_moe_ops.prepared.tensors import plain_values, tensors_of

NVFP4 = SCHEMES["nvfp4"]


def random_raw(rows: int, hidden: int, gated: bool, experts: int = 2, seed: int = 0) -> moe.RawWeights:
    """Every code and every scale that a checkpoint may hold."""
    g = torch.Generator().manual_seed(seed)
    inter = rows // 2 if gated else rows

    def codes(n: int, k: int) -> torch.Tensor:
        return torch.randint(0, 256, (experts, n, k // 2), generator=g, dtype=torch.uint8)

    def scales(n: int, k: int) -> torch.Tensor:
        return torch.randint(0, 127, (experts, n, k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)

    return moe.RawWeights(
        scheme="nvfp4",
        w13=codes(rows, hidden),
        w13_scale=scales(rows, hidden),
        w13_scale_2=torch.rand((experts, 2 if gated else 1), generator=g) + 0.5,
        w2=codes(hidden, inter),
        w2_scale=scales(hidden, inter),
        w2_scale_2=torch.rand(experts, generator=g) + 0.5,
        activation="silu" if gated else "relu2_no_mul",
    )


# What a kernel computes from the stored bytes, index by index: csrc/cuda/sm90/layout/layout.h and formats.cuh.
FIELDS = 0x81C081C0
WEIGHT_UNIT = 2.0**126  # bits of a code as bfloat16 are its value / 2^126
SCALE_UNIT = 2.0**-88


def bfloat16(bits: int) -> float:
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])


def decode_tile(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[2048] and [256] bytes -> float64 [64, 64] in the natural order of K."""
    tile = np.full((64, 64), np.nan)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        g, c = divmod(lane, 4)
        for step in range(4):
            at = 16 * thread + 4 * step
            word = int.from_bytes(bytes(codes[at : at + 4]), "little")
            rotated = (word >> 4 | word << 28) & 0xFFFFFFFF
            for i, field in enumerate((word << 6, word << 2, rotated, word ^ word >> 8)):
                row = 16 * warp + g + 8 * (i % 2)
                byte = int(scales[2 * thread + i % 2])
                scale = bfloat16((byte << 4) + 0x6000) * SCALE_UNIT
                for b in range(2):
                    bits = (field & FIELDS) >> 16 * b & 0xFFFF
                    tile[row, 16 * c + 4 * step + 2 * (i // 2) + b] = bfloat16(bits) * WEIGHT_UNIT * scale
    return tile


def decode_weight(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """[row tiles, K tiles, bytes] of one expert -> float64 [rows, K], as many as are stored."""
    rows = [
        np.concatenate([decode_tile(*pair) for pair in zip(codes[i].numpy(), scales[i].numpy(), strict=True)], axis=1)
        for i in range(codes.shape[0])
    ]
    return np.concatenate(rows)


def rows_of_halves(stored: np.ndarray) -> np.ndarray:
    """Rows as stored -> [gate; up], both with their padding: row 16 q + g is gate row 8 q + g, + 8 the up row."""
    row = np.arange(stored.shape[0] // 2)
    gate = 16 * (row // 8) + row % 8
    return stored[np.concatenate([gate, gate + 8])]


def close(stored: np.ndarray, expected: np.ndarray) -> bool:
    """Equal where the scale is not zero: a byte of 0 decodes to 2^-23."""
    return bool((np.abs(stored - expected) <= np.where(expected == 0, 6 * 2.0**-23, 0)).all())


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize(("inter", "hidden"), ((48, 64), (80, 176), (64, 128)))
def test_a_decoder_made_from_the_text_reads_the_weights(inter: int, hidden: int, gated: bool) -> None:
    raw = random_raw((2 if gated else 1) * inter, hidden, gated)
    prepared = cuda_sm90.prepare(raw)
    for e in range(raw.num_experts):
        for name, halved in (("w13", gated), ("w2", False)):
            scale = getattr(raw, f"{name}_scale")
            expected = nvfp4.dequantize(getattr(raw, name)[e], scale[e], dtype=torch.float64).numpy()
            stored = decode_weight(prepared[name][e], prepared[f"{name}_scale"][e])
            stored = rows_of_halves(stored) if halved else stored
            halves = expected.reshape(2 if halved else 1, -1, expected.shape[1])
            padded = stored.reshape(halves.shape[0], -1, stored.shape[1])
            assert close(padded[:, : halves.shape[1], : halves.shape[2]], halves)
            assert not padded[:, halves.shape[1] :].any() and not padded[:, :, halves.shape[2] :].any()


def test_what_prepare_lays_out_is_what_the_checkpoint_means() -> None:
    raw = make_raw(Case(hidden=128, inter=64))
    prepared = cuda_sm90.prepare(raw)
    w13, w2 = moe.dequantize_experts(raw)
    assert raw.w13_scale_2 is not None and raw.w2_scale_2 is not None
    stored = rows_of_halves(decode_weight(prepared["w13"][1], prepared["w13_scale"][1])) * float(raw.w13_scale_2[1, 0])
    np.testing.assert_allclose(stored, w13[1].numpy(), rtol=1e-6, atol=1e-9)
    stored = decode_weight(prepared["w2"][1], prepared["w2_scale"][1]) * float(raw.w2_scale_2[1])
    np.testing.assert_allclose(stored, w2[1].numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize(
    ("inter", "hidden"),
    ((16, 16), (176, 64), (704, 2688), (1408, 192), (1856, 320), (48, 7168), (2880, 80), (96, 2880)),
)
def test_restore_is_the_inverse(inter: int, hidden: int, gated: bool) -> None:
    raw = random_raw((2 if gated else 1) * inter, hidden, gated)
    sizes = Sizes(raw.num_experts, hidden, inter, gated, torch.uint8)
    prepared = cuda_sm90.prepare(raw)
    for name, (shapes, dtypes) in cuda_sm90.specs(NVFP4, sizes).items():
        assert tuple(prepared[name].shape) in shapes and prepared[name].dtype in dtypes
    restored = cuda_sm90.restore(NVFP4, prepared, sizes)
    for name, tensor in restored.items():
        given = getattr(raw, name)
        assert tensor.dtype == given.dtype and torch.equal(tensor.view(torch.uint8), given.view(torch.uint8)), name


def test_every_code_of_a_scale() -> None:
    """Values by the formula of layout.h: (r + 23) << 3 | m stands for 2^r * (1 + m / 8)."""
    code = torch.arange(127, dtype=torch.uint8)
    values = code.view(torch.float8_e4m3fn).double()
    byte = scales._bytes_of_e4m3(torch.device("cpu")).long()
    decoded = torch.exp2(((byte >> 3) - 23).double()) * (1 + (byte & 7) / 8)
    assert torch.equal(decoded[1:], values[1:]) and byte[0] == 0
    assert byte.unique().numel() == 127


@pytest.mark.parametrize("bits", (0x80, 0x81, 0xFF, 0x7F))
@pytest.mark.parametrize("name", ("w13_scale", "w2_scale"))
def test_scales_without_a_byte_are_refused(name: str, bits: int) -> None:
    raw = random_raw(64, 64, True, experts=3)
    getattr(raw, name).view(torch.uint8)[1, 5, 1] = bits
    text = f"backend 'cuda_sm90': {name} must hold positive finite scales or zero .*got code {bits:#x} in expert 1"
    with pytest.raises(ValueError, match=text):
        cuda_sm90.prepare(raw)


def test_views_and_odd_offsets_are_laid_out_alike() -> None:
    raw = random_raw(64, 64, True)
    storage = torch.empty(raw.w13.numel() + 1, dtype=torch.uint8)
    storage[1:] = raw.w13.flatten()
    odd = dataclasses.replace(raw, w13=storage[1:].view(raw.w13.shape))
    wide = torch.stack((raw.w2, raw.w2), dim=-1)[..., 0]
    assert torch.equal(cuda_sm90.prepare(odd)["w13"], cuda_sm90.prepare(raw)["w13"])
    assert torch.equal(layout.pack_codes(wide, False, layout.E2M1), cuda_sm90.prepare(raw)["w2"])


def prepared_layer(raw: moe.RawWeights) -> PreparedWeights:
    """What moe.prepare makes, on a machine that cannot run it."""
    backend = BACKENDS["cuda_sm90"]
    keep = {"activation": None, "act_format": "none", "num_experts": None, "local_expert_offset": 0}
    rest = {"swiglu": (None, None, None), "router_weight_on_input": False, "weight_policy": "exact"}
    settings = settings_of(raw, **keep, **rest)  # type: ignore[arg-type]
    tensors = tensors_of(raw, backend, settings, raw.device)
    return PreparedWeights(
        backend=backend.name, layout=backend.layout.name, raw=plain_values(raw), **settings, **tensors
    )


@pytest.mark.parametrize("gated", (True, False))
def test_a_layer_with_biases_comes_back(gated: bool, tmp_path: Path) -> None:
    case = Case(hidden=128, inter=176, bias=True, per_half=gated, activation="silu" if gated else "relu2_no_mul")
    raw = make_raw(case)
    w = prepared_layer(raw)
    assert w.w13_bias is not None and w.w13_bias.shape[1] == (2 if gated else 1) * 192
    w.save(tmp_path / "layer.safetensors")
    again = PreparedWeights.load(tmp_path / "layer.safetensors")
    for layer in (w, again):
        back = moe.restore(layer)
        for name, tensor in raw.tensors().items():
            assert torch.equal(getattr(back, name).contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def test_update_keeps_addresses() -> None:
    case = Case(hidden=128, inter=176)
    w = prepared_layer(make_raw(case))
    new = make_raw(dataclasses.replace(case, seed=5))
    before = {name: t.data_ptr() for name, t in w.tensors().items()}
    w.update_(new)
    assert {name: t.data_ptr() for name, t in w.tensors().items()} == before
    for name, tensor in prepared_layer(new).tensors().items():
        assert torch.equal(w.tensors()[name], tensor), name


HOPPER = moe.Problem("nvfp4", device="cuda", capability=(9, 0), num_experts=8, hidden_size=128, intermediate_size=48)


def test_reasons_name_what_does_not_fit() -> None:
    backend = BACKENDS["cuda_sm90"]
    assert backend.fits_anywhere(HOPPER)
    assert backend.fits_anywhere(dataclasses.replace(HOPPER, act_format="nvfp4", input_scale="expert"))
    for change, text in (
        ({"device": "cpu", "capability": None}, "device must be one of ['cuda'], got 'cpu'"),
        ({"capability": (8, 0)}, "compute capability must be (9, 0)"),
        ({"capability": (10, 0)}, "got (10, 0)"),
        ({"scheme": "int4"}, "scheme must be one of ['nvfp4', 'mxfp4', 'fp8', 'fp8_block', 'mxfp8', 'int8']"),
        ({"scheme": "mxfp4", "act_format": "nvfp4"}, "act_format must be one of ['none', 'fp8', 'mxfp8']"),
        ({"act_format": "mxfp8"}, "act_format must be one of ['nvfp4', 'none', 'fp8'] for scheme 'nvfp4'"),
        ({"act_format": "fp8", "weight_policy": "folded"}, "weight_policy must be one of ['exact']"),
        ({"dtype": torch.float32}, "dtype must be torch.bfloat16 or torch.float16"),
        ({"hidden_size": 80}, "hidden_size must be a multiple of 32, got 80"),
        ({"num_experts": 1025, "num_local_experts": 1025}, "num_local_experts must be at most 1024, got 1025"),
    ):
        reasons = backend.reasons(dataclasses.replace(HOPPER, **change))  # type: ignore[arg-type]
        assert any(text in reason for reason in reasons), (change, reasons)


def test_integer_weights_are_not_strict() -> None:
    for scheme in ("int4", "mxint4"):
        problem = dataclasses.replace(HOPPER, scheme=scheme, act_format="none")
        assert BACKENDS["cuda_sm90_int4"].fits_anywhere(problem)
        assert not BACKENDS["cuda_sm90"].fits_anywhere(problem)
    assert BACKENDS["cuda_sm90_int4"].accuracy == "standard"
    assert not BACKENDS["cuda_sm90_int4"].fits_anywhere(HOPPER)


@pytest.mark.parametrize("zero", (False, True), ids=("", "zero points"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("group", (64, 512), ids=("64", "row"))
def test_larger_groups_of_int4_are_the_same_bytes(group: int, dtype: torch.dtype, zero: bool) -> None:
    """So that what was measured of groups of 128 holds of groups of 64 on this backend (backends/accuracy.py)."""
    g, k = torch.Generator().manual_seed(0), 512
    shapes = {"w13": (2, 2 * k, k // 8), "w2": (2, k, k // 8)}  # eight codes a word
    codes = {name: torch.randint(-(2**31), 2**31, shape, generator=g).int() for name, shape in shapes.items()}
    differ = k // max(group, 128)  # scales of a row
    scale = {name: (torch.rand(*shape[:2], differ, generator=g) + 0.5).to(dtype) for name, shape in shapes.items()}
    points = {name: torch.randint(0, 16, s.shape, generator=g, dtype=torch.uint8) for name, s in scale.items()}

    def prepared(group: int) -> dict[str, torch.Tensor]:
        def of_groups(of: dict[str, torch.Tensor], suffix: str) -> dict[str, torch.Tensor]:
            return {f"{name}_{suffix}": t.repeat_interleave(k // group // differ, 2) for name, t in of.items()}

        fields: dict[str, torch.Tensor] = (
            codes | of_groups(scale, "scale") | (of_groups(points, "zero_point") if zero else {})
        )
        return cuda_sm90.prepare(moe.RawWeights("int4", **fields))

    others, wanted = prepared(group), prepared(128)
    for name, tensor in wanted.items():
        assert torch.equal(others[name].flatten(), tensor.flatten()), name
        # By which the ops tell the forms, and with them the kernels.
        assert (others[name].dtype, others[name].shape[-1]) == (tensor.dtype, tensor.shape[-1]), name


def test_weights_that_are_rounded_are_for_bfloat16() -> None:
    """Other kernels round them to float16 beside float16 hidden states: eight times nearer."""
    problem = dataclasses.replace(HOPPER, scheme="int4", dtype=torch.float16)
    assert "dtype must be torch.bfloat16" in "".join(BACKENDS["cuda_sm90_int4"].reasons(problem))
    assert BACKENDS["cuda_sm90"].fits_anywhere(dataclasses.replace(HOPPER, dtype=torch.float16))


def hopper_layer(experts: int, hidden: int, inter: int, top_k: int | None) -> moe.Problem:
    return dataclasses.replace(
        HOPPER,
        num_experts=experts,
        num_local_experts=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        top_k=top_k,
    )


def test_explain_tells_which_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # no table of this machine's device
    notes = BACKENDS["cuda_sm90"].notes
    assert notes(hopper_layer(256, 7168, 2048, 8)) == (
        "decode kernel up to 56 tokens (without grid barriers up to 8, while its buffers fit an SM), "
        "slim tiles of the prefill kernel up to 768, narrow tiles of the prefill kernel up to 2560, "
        "wide tiles of the prefill kernel beyond (by rules)"
    )
    assert notes(hopper_layer(256, 7168, 2048, None)).startswith("decode kernel up to 14 to 448")
    assert "SM), narrow tiles of the prefill kernel up to 320, wide" in notes(hopper_layer(8, 4096, 14336, 2))

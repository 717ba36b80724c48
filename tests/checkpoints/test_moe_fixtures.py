"""Checkpoints of third-party tools, end to end: loaded, prepared, run through torch.ops.moeq."""

from __future__ import annotations

import pytest
import torch
from fixture_layers import CHECKPOINTS, LAYERS, NVFP4_LAYERS, Expected, expected
from tolerances import BF16, F32, W4A4, relative_l2

import torch_moe_ops as moe
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.schemes import SCHEMES

layers = pytest.mark.parametrize(("name", "layer"), LAYERS)
nvfp4_layers = pytest.mark.parametrize(("name", "layer"), NVFP4_LAYERS)
backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


def _run(raw: moe.RawWeights, want: Expected, dtype: torch.dtype, act_format: str, backend: str) -> torch.Tensor:
    w = moe.prepare(raw, act_format=act_format, backend=backend)
    return moe.fused_moe_routed(want.hidden.to(dtype), want.ids, want.weights, w)


@layers
def test_dequantized_weights_equal_the_tool(name: str, layer: int) -> None:
    want = expected(name, layer)
    w13, w2 = moe.dequantize_experts(moe.load_experts(CHECKPOINTS / name, layer=layer))
    for e in (0, 1):
        # compressed-tensors stores the reciprocal of the global scale: one ulp is lost.
        rtol = 3e-7 if name == "qwen3_moe_ct_nvfp4" else 0.0
        torch.testing.assert_close(w13[e], want[f"w13_deq_e{e}"], rtol=rtol, atol=0)
        torch.testing.assert_close(w2[e], want[f"w2_deq_e{e}"], rtol=rtol, atol=0)


@layers
@backends
def test_weight_only_float32(name: str, layer: int, backend: str) -> None:
    want = expected(name, layer)
    out = _run(moe.load_experts(CHECKPOINTS / name, layer=layer), want, torch.float32, "none", backend)
    assert relative_l2(out, want["moe_out_dequant"]) < F32


@layers
@backends
def test_weight_only_bfloat16(name: str, layer: int, backend: str) -> None:
    want = expected(name, layer)
    out = _run(moe.load_experts(CHECKPOINTS / name, layer=layer), want, torch.bfloat16, "none", backend)
    assert out.dtype == torch.bfloat16
    assert relative_l2(out, want["moe_out_dequant"]) < BF16


@pytest.mark.parametrize("policy", ["packed", "folded"])
@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "qwen3_moe_ct_mxfp4"])
def test_mxfp4_checkpoints_keep_their_weights_under_every_policy(name: str, policy: str) -> None:
    """The same bits as with exact weights: their rows' scales lie within e4m3's reach."""
    want, raw = expected(name, 0), moe.load_experts(CHECKPOINTS / name, layer=0)
    outs = []
    for one in ("exact", policy):
        w = moe.prepare(raw, act_format="fp8", backend="reference", weight_policy=one)
        outs.append(moe.fused_moe_routed(want.hidden, want.ids, want.weights, w))
    assert torch.equal(*outs)


@layers
def test_reference_in_float64_without_rounding(name: str, layer: int) -> None:
    """Nothing but the float32 of the stored expected values separates the two."""
    want = expected(name, layer)
    w = moe.prepare(moe.load_experts(CHECKPOINTS / name, layer=layer), act_format="none", backend="reference")
    from torch_moe_ops.oracle.reference import experts_reference

    out = experts_reference(make_call(w, want), emulate=False, dtype=torch.float64)
    assert relative_l2(out, want["moe_out_dequant"]) < 3e-7


@nvfp4_layers
@backends
def test_w4a4_rows_agree_with_the_tool(name: str, layer: int, backend: str) -> None:
    """Row by row: a tie in a block scale is broken differently by the tool and moves a whole block."""
    want = expected(name, layer)
    raw = moe.load_experts(CHECKPOINTS / name, layer=layer)
    if "moe_out_w4a4" not in want:
        assert raw.a13_input_scale is None, "a checkpoint with input scales has a W4A4 result"
        return
    out = _run(raw, want, torch.float32, "nvfp4", backend).double()
    tool = want["moe_out_w4a4"].double()
    errors = (out - tool).norm(dim=1) / tool.norm(dim=1)
    assert (errors < 6e-3).double().mean() >= 0.8, errors


@nvfp4_layers
def test_cpu_w4a4_equals_the_emulating_reference(name: str, layer: int) -> None:
    want = expected(name, layer)
    raw = moe.load_experts(CHECKPOINTS / name, layer=layer)
    for dtype in (torch.float32, torch.bfloat16):
        pair = [_run(raw, want, dtype, "nvfp4", backend) for backend in ("cpu", "reference")]
        assert relative_l2(*pair) < W4A4


@layers
def test_every_activation_format_of_the_scheme(name: str, layer: int) -> None:
    """`cpu` against the reference that makes every rounding step, with the checkpoint's own input scales."""
    want = expected(name, layer)
    raw = moe.load_experts(CHECKPOINTS / name, layer=layer)
    for act_format in SCHEMES[raw.scheme].act_formats:
        pair = [_run(raw, want, torch.bfloat16, act_format, backend) for backend in ("cpu", "reference")]
        assert relative_l2(*pair) < BF16, act_format


@layers
@backends
def test_inside_a_compiled_model(name: str, layer: int, backend: str) -> None:
    want = expected(name, layer)
    w = moe.prepare(moe.load_experts(CHECKPOINTS / name, layer=layer), backend=backend)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + moe.fused_moe_routed(x, ids, weights, w)

    eager = want.hidden + moe.fused_moe_routed(want.hidden, want.ids, want.weights, w)
    assert torch.equal(block(want.hidden, want.ids, want.weights), eager)


def make_call(w: moe.PreparedWeights, want: Expected) -> ExpertsCall:
    """The call that the op would hand to the reference."""
    from torch_moe_ops.core.activations import resolve_constants

    alpha, beta, limit = resolve_constants(w.activation, w.swiglu_alpha, w.swiglu_beta, w.swiglu_limit)
    values = dict.fromkeys(ExpertsCall._fields)
    values |= w.tensors() | w.metadata()
    values |= {"hidden_states": want.hidden, "topk_ids": want.ids, "topk_weights": want.weights}
    values |= {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": limit, "out_dtype": torch.float32}
    return ExpertsCall(**{name: values[name] for name in ExpertsCall._fields})

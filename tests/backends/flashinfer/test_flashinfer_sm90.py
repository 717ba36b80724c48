"""`flashinfer_cutlass` on a Hopper GPU against the oracle, with the real module where it has been built.

scripts/flashinfer_build_sm90.sh builds it, or the part of it that these cases need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from problems import Case, make_batch
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import package
from torch_moe_ops.backends.flashinfer_cutlass import ACTIVATIONS
from torch_moe_ops.core.activations import ACTIVATIONS as ACTIVATIONS_OF
from torch_moe_ops.flashinfer import warmup

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_cutlass_cases import NAME, raw_of


def built() -> bool:
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return on_hopper and package.is_built("fused_moe_90")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not built(), reason="needs a Hopper GPU and FlashInfer's SM90 CUTLASS module"),
]

BF16 = Case(scheme="none", tokens=37, experts=8, top_k=3, hidden=512, inter=256)
FP8 = dataclasses.replace(BF16, scheme="fp8", act_format="fp8", input_scale="tensor")
BLOCK = dataclasses.replace(BF16, scheme="fp8_block", act_format="fp8")
CASES = {
    "bf16": BF16,
    "bf16 one token": dataclasses.replace(BF16, tokens=1),
    "bf16 padded": dataclasses.replace(BF16, hidden=100, inter=60, tokens=5),
    "bf16 foreign ids": dataclasses.replace(BF16, foreign=True),
    "bf16 bias": dataclasses.replace(BF16, activation="swigluoai", bias=True, hidden=136),
    **{
        f"bf16 {activation}": dataclasses.replace(BF16, activation=activation, bias=True)
        for activation in ACTIVATIONS["none"]
    },
    "f16": dataclasses.replace(BF16, dtype=torch.float16),
    "f16 bias": dataclasses.replace(BF16, dtype=torch.float16, activation="gelu", bias=True, hidden=136),
    "bf16 large": dataclasses.replace(BF16, tokens=700, experts=64, top_k=8, hidden=2048, inter=768),
    "fp8": FP8,
    "fp8 padded": dataclasses.replace(FP8, hidden=136, inter=200, tokens=3),
    "fp8 relu2": dataclasses.replace(FP8, activation="relu2_no_mul"),
    "fp8 gpt-oss": dataclasses.replace(FP8, activation="swigluoai", bias=True),
    "fp8 situ": dataclasses.replace(FP8, activation="situ", bias=True),
    "fp8_block": BLOCK,
    "fp8_block gpt-oss": dataclasses.replace(BLOCK, activation="swigluoai", bias=True),
    "fp8_block padded": dataclasses.replace(BLOCK, hidden=200, inter=136),
}
# The kernels round what every GEMM gives to bfloat16: before the activation, where some fp8 codes of the intermediate
# follow from it, and before the sum over experts. The oracle keeps float32.
BOUNDS = {"none": 6e-3, "fp8": 1.5e-2, "fp8_block": 2.5e-2}


# Sums in another order still round to another bfloat16 here and there, and codes follow.
OWN_BOUNDS = {"none": 3e-3, "fp8": 8e-3, "fp8_block": 1.1e-2}


def layers(case: Case) -> tuple[moe.PreparedWeights, moe.PreparedWeights]:
    raw = raw_of(case).to("cuda")
    return tuple(moe.prepare(raw, act_format=case.act_format, backend=b) for b in (NAME, "reference"))


def rounded_as_theirs(case: Case, raw: moe.RawWeights, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The layer with the kernels' roundings: both GEMMs give bfloat16, and FP8 blocks see a bfloat16 activation."""
    x, ids, weights = batch
    w13, w2 = moe.dequantize_experts(raw)
    activation, half = ACTIVATIONS_OF[case.activation], case.dtype
    operand = quantized(case, raw.a13_input_scale)
    intermediate = quantized(case, raw.a2_input_scale)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(case.experts):
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        first = (operand(x.float())[token] @ w13[e].float().T).to(half).float()
        first = first if raw.w13_bias is None else first + raw.w13_bias[e].float()
        gate, up = first.chunk(2, -1) if activation.is_gated else (first, first)
        h = activation.formula(gate, up, *activation.constants)
        h = h if case.scheme == "fp8" else h.to(half).float()
        y = (intermediate(h) @ w2[e].float().T).to(half).float()
        y = y if raw.w2_bias is None else y + raw.w2_bias[e].float()
        out.index_add_(0, token, y * weights[token, slot, None])
    return out.to(half)


def quantized(case: Case, scale: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What is left of an operand after its quantization."""
    if case.scheme == "none":
        return lambda x: x
    if case.scheme == "fp8":
        assert scale is not None
        return lambda x: (x * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def by_groups(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
        factor = 448 / padded.abs().amax(-1, keepdim=True)
        factor = torch.where(factor.isinf(), torch.ones_like(factor), factor)
        codes = (padded * factor).to(torch.float8_e4m3fn).float()
        return (codes * (1 / factor)).flatten(-2)[..., : x.shape[-1]]

    return by_groups


@pytest.mark.parametrize("name", CASES)
def test_equals_a_layer_with_its_own_roundings(name: str) -> None:
    """Sharper than the oracle, which rounds less."""
    case = CASES[name]
    raw, batch = raw_of(case).to("cuda"), make_batch(case, "cuda")
    w = moe.prepare(raw, act_format=case.act_format, backend=NAME)
    error = relative_l2(moe.fused_moe_routed(*batch, w), rounded_as_theirs(case, raw, batch))
    assert error < OWN_BOUNDS[case.scheme], error


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    case = CASES[name]
    w, oracle = layers(case)
    batch = make_batch(case, "cuda")
    got, expected = moe.fused_moe_routed(*batch, w), moe.fused_moe_routed(*batch, oracle)
    assert relative_l2(got, expected) < BOUNDS[case.scheme]
    assert torch.equal(got, moe.fused_moe_routed(*batch, w)), "not deterministic"


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_ranks_of_expert_parallelism_add_up(name: str) -> None:
    case = CASES[name]
    raw = raw_of(case).to("cuda")
    batch = make_batch(case, "cuda")
    whole = moe.fused_moe_routed(*batch, moe.prepare(raw, act_format=case.act_format, backend=NAME))
    total = torch.zeros_like(whole, dtype=torch.float32)
    for rank in range(2):
        parallel = moe.config.FusedMoEParallelConfig.make(2, 1, 1, 1, enable_expert_parallel=True, tp_rank=rank)
        w = moe.prepare(raw, act_format=case.act_format, backend=NAME, parallel=parallel)
        total += moe.fused_moe_routed(*batch, w).float()
    assert relative_l2(total, whole) < 6e-3


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_block"])
def test_captured_in_a_cuda_graph(name: str) -> None:
    w, _ = layers(CASES[name])
    x, ids, weights = make_batch(CASES[name], "cuda")
    eager = moe.fused_moe_routed(x, ids, weights, w)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moe.fused_moe_routed(x, ids, weights, w)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.fused_moe_routed(x, ids, weights, w)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, eager)


def test_compiled_without_graph_breaks() -> None:
    w, _ = layers(BF16)
    batch = make_batch(BF16, "cuda")
    layer = torch.compile(lambda x, ids, weights: moe.fused_moe_routed(x, ids, weights, w) + 1, fullgraph=True)
    assert relative_l2(layer(*batch), moe.fused_moe_routed(*batch, w) + 1) < 2e-3


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_warmup_tunes_and_results_stay_right(name: str) -> None:
    """Tactics that a part of the module does not have are passed over."""
    case = CASES[name]
    w, oracle = layers(case)
    said: list[str] = []
    warmup(w, case.top_k, tokens=(1, case.tokens), progress=said.append)
    assert len(said) == 2
    batch = make_batch(case, "cuda")
    got, expected = moe.fused_moe_routed(*batch, w), moe.fused_moe_routed(*batch, oracle)
    assert relative_l2(got, expected) < BOUNDS[case.scheme]

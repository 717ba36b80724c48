"""Sample inputs of every op overload: the one source for opcheck, compile and error tests.

A new op without an entry here fails test_opcheck.test_every_overload_has_samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import torch_moe_ops as moe
from problems import Case, make_batch, make_raw
from torch_moe_ops.schemes import SCHEMES

Sample = tuple[tuple[Any, ...], dict[str, Any]]

BACKENDS = ("reference", "cpu")


def routed_cases() -> list[Case]:
    base = Case(tokens=5)
    return [
        base,
        replace(base, tokens=0),
        replace(base, tokens=1, top_k=1),
        replace(base, act_format="nvfp4", input_scale="tensor", bias=True),
        replace(base, act_format="nvfp4", input_scale="expert", per_half=True, foreign=True),
        replace(base, act_format="nvfp4", activation="relu2_no_mul", dtype=torch.float16),
    ]


def plain_cases() -> list[Case]:
    base = Case(scheme="none", hidden=40, inter=24)
    return [base, replace(base, tokens=0), replace(base, dtype=torch.float32, bias=True, foreign=True)]


CASES: dict[str, Callable[[], list[Case]]] = {"nvfp4": routed_cases, "none": plain_cases}


def prepared(case: Case, backend: str, device: str) -> moe.PreparedWeights:
    return moe.prepare(make_raw(case), act_format=case.act_format, backend=backend, device=device)


def routed_sample(case: Case, backend: str, device: str = "cpu", **options: Any) -> Sample:
    w = prepared(case, backend, device)
    x, ids, weights = make_batch(case, device)
    keywords = {"act_format": w.act_format, "activation": w.activation, **options}
    return (x, None, ids, weights, *w.op_weights(), backend), keywords


def monolithic_sample(case: Case, backend: str, device: str = "cpu", **options: Any) -> Sample:
    w = prepared(case, backend, device)
    x, _, _ = make_batch(case, device)
    logits = torch.randn(case.tokens, case.experts, device=device)
    keywords = {"act_format": w.act_format, "activation": w.activation, **options}
    return (x, None, logits, None, *w.op_weights(), backend, "renormalize", case.top_k), keywords


def packed_sample(backend: str, device: str = "cpu") -> Sample:
    """Hidden states quantized beforehand."""
    case = Case(act_format="nvfp4", input_scale="tensor")
    args, keywords = routed_sample(case, backend, device)
    gscale = prepared(case, backend, device).a1_gscale
    codes, scale = moe.quantize_nvfp4(args[0], gscale)
    return (codes, scale, *args[2:]), keywords


def _routed(scheme: str) -> Callable[[str], list[Sample]]:
    def samples(device: str) -> list[Sample]:
        names = [b for b in BACKENDS if device == "cpu" or b != "cpu"]
        found = [routed_sample(case, name, device) for name in names for case in CASES[scheme]()]
        if scheme == "nvfp4":
            found += [packed_sample(name, device) for name in names]
        return found

    return samples


def _routed_out(scheme: str) -> Callable[[str], list[Sample]]:
    def samples(device: str) -> list[Sample]:
        found = []
        for args, keywords in _routed(scheme)(device):
            tokens = args[2].shape[0]
            hidden = args[0].shape[1] * (2 if args[1] is not None else 1)
            dtype = torch.bfloat16 if args[1] is not None else args[0].dtype
            found.append((args, {**keywords, "out": torch.zeros(tokens, hidden, dtype=dtype, device=device)}))
        return found

    return samples


def _monolithic(scheme: str) -> Callable[[str], list[Sample]]:
    def samples(device: str) -> list[Sample]:
        names = [b for b in BACKENDS if device == "cpu" or b != "cpu"]
        return [
            monolithic_sample(case, name, device)
            for name in names
            for case in CASES[scheme]()
            if not case.foreign
        ]

    return samples


def _route(device: str) -> list[Sample]:
    logits, bias = torch.randn(5, 16, device=device), torch.randn(16, device=device)
    return [
        ((logits, None, "renormalize", 4), {}),
        ((logits.bfloat16(), None, "default", 4), {}),
        ((logits, bias, "deepseek_v3", 4, 4, 2, 2.5), {}),
        ((logits[:0], None, "sigmoid", 2), {}),
        ((logits, None, "llama4", 1), {}),
    ]


def _quantize_nvfp4(device: str) -> list[Sample]:
    x = torch.randn(5, 32, device=device)
    scale = torch.tensor(100.0, device=device)
    return [
        ((x.bfloat16(), scale), {}),
        ((x[:0], scale), {}),
        ((x, torch.rand(5, device=device) * 100), {}),
        ((x.half().expand(2, 5, 32), scale), {}),
    ]


def _dynamic_gscale(device: str) -> list[Sample]:
    return [((torch.randn(5, 32, device=device).bfloat16(),), {}), ((torch.randn(0, 16, device=device),), {})]


def _swizzle(device: str) -> list[Sample]:
    scale = torch.rand(2, 130, 6, device=device)
    return [((scale.to(torch.float8_e4m3fn),), {}), ((scale.bfloat16(),), {})]


def _unswizzle(device: str) -> list[Sample]:
    return [((moe.swizzle_scale(args[0]), 130, 6), {}) for args, _ in _swizzle(device)]


SAMPLES: dict[str, Callable[[str], list[Sample]]] = {
    "route": _route,
    "quantize_nvfp4": _quantize_nvfp4,
    "dynamic_gscale_nvfp4": _dynamic_gscale,
    "swizzle_scale": _swizzle,
    "unswizzle_scale": _unswizzle,
}
for _name, _scheme in SCHEMES.items():
    SAMPLES[f"{_scheme.op_prefix}moe"] = _monolithic(_name)
    SAMPLES[f"{_scheme.op_prefix}moe_routed"] = _routed(_name)
    SAMPLES[f"{_scheme.op_prefix}moe_routed.out"] = _routed_out(_name)


def overload(name: str) -> Any:
    """torch.ops.moeq.<name>, `.default` where no overload is named."""
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.moeq, packet), suffix or "default")

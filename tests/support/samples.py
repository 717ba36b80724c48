"""Sample inputs of every op overload: the one source for opcheck, compile and error tests.

A new op without an entry here fails test_opcheck.test_every_overload_has_samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from groups_of_one import group_of_one
from lora_cases import factors_of
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemas import FAMILIES, arguments
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES, Scheme
from torch_moe_ops.numerics import mx
from torch_moe_ops.oracle.operands import MX_ELEMENTS

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def nvfp4_cases() -> list[Case]:
    base = Case(tokens=5)
    return [
        base,
        replace(base, tokens=0),
        replace(base, tokens=1, top_k=1),
        replace(base, act_format="nvfp4", input_scale="tensor", bias=True),
        replace(base, act_format="nvfp4", input_scale="expert", per_half=True, foreign=True),
        replace(base, act_format="nvfp4", activation="relu2_no_mul", dtype=torch.float16),
        *(replace(base, act_format="fp8", weight_policy=policy) for policy in ("exact", "packed", "folded")),
    ]


def plain_cases() -> list[Case]:
    base = Case(scheme="none", hidden=40, inter=24)
    return [base, replace(base, tokens=0), replace(base, dtype=torch.float32, bias=True, foreign=True)]


def scheme_cases(scheme: Scheme) -> list[Case]:
    """Every activation format of a scheme, and no token once."""
    base = Case(scheme=scheme.name, hidden=96, inter=64, bias=True)
    found = [replace(base, act_format=act) for act in scheme.act_formats]
    found += [replace(base, act_format=act, input_scale="expert") for act in scheme.static_acts]
    return [*found, replace(base, tokens=0, act_format=scheme.act_formats[0])]


def cases(family: str) -> list[Case]:
    if family == "nvfp4":
        return nvfp4_cases()
    if family == "":
        return plain_cases()
    return [case for scheme in FAMILIES[family] for case in scheme_cases(scheme)]


def prepared(case: Case, backend: str, device: str) -> moe.PreparedWeights:
    raw = make_raw(case)
    return moe.prepare(
        raw, act_format=case.act_format, backend=backend, device=device, weight_policy=case.weight_policy
    )


def runs(case: Case, backend: str, device: str) -> bool:
    """Whether a backend takes the case: its weights, and hidden states of its dtype."""
    return not _against(case, device)[backend] and case.dtype in BACKENDS[backend].hidden_dtypes


@functools.cache
def _against(case: Case, device: str) -> dict[str, Any]:
    """By backend, why it does not take the weights of a case."""
    settings = {"act_format": case.act_format, "weight_policy": case.weight_policy, "device": device}
    return dict(moe.explain(make_raw(case), **settings).against)


def _options(case: Case, w: moe.PreparedWeights) -> dict[str, Any]:
    scheme = SCHEMES[case.scheme]
    element = {"element": scheme.element} if len(FAMILIES[scheme.family]) > 1 else {}
    return {"act_format": w.act_format, "activation": w.activation, "weight_policy": case.weight_policy, **element}


def routed_sample(case: Case, backend: str, device: str = "cpu") -> Sample:
    w = prepared(case, backend, device)
    x, ids, weights = make_batch(case, device)
    return (x, None, ids, weights, *w.op_weights(), backend), _options(case, w)


def monolithic_sample(case: Case, backend: str, device: str = "cpu") -> Sample:
    w = prepared(case, backend, device)
    x, _, _ = make_batch(case, device)
    logits = torch.randn(case.tokens, case.experts, device=device)
    args = (x, None, logits, None, *w.op_weights(), backend, "renormalize", case.top_k)
    return args, _options(case, w)


def packed_case(scheme: Scheme, act_format: str) -> Case:
    scale = "tensor" if act_format == "nvfp4" else "none"
    return Case(scheme=scheme.name, act_format=act_format, input_scale=scale, hidden=96, inter=64)


def packed_sample(case: Case, backend: str, device: str = "cpu") -> Sample:
    """Hidden states quantized beforehand, as `case.act_format` stores them."""
    args, keywords = routed_sample(case, backend, device)
    gscale = prepared(case, backend, device).a1_gscale
    codes, scale = quantize(args[0], case, gscale)
    return (codes, scale, *args[2:]), keywords


def quantize(x: torch.Tensor, case: Case, gscale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed hidden states and their scales."""
    act = case.act_format
    if act == "nvfp4":
        return moe.quantize_nvfp4(x, gscale)
    if act == "fp8":
        return torch.ops.moeq.quantize_fp8(x, None, SCHEMES[case.scheme].fp8_group)
    if act == "int8":
        return torch.ops.moeq.quantize_int8(x)
    return mx.quantize_mx(x, MX_ELEMENTS[act])


def _backends(device: str) -> list[str]:
    return [name for name in BACKENDS if device == "cpu" or name != "cpu"]


def _routed(family: str) -> Callable[[str], list[Sample]]:
    def samples(device: str) -> list[Sample]:
        names = _backends(device)
        found = [routed_sample(case, n, device) for n in names for case in cases(family) if runs(case, n, device)]
        for scheme in FAMILIES[family]:
            packed = [packed_case(scheme, act) for act in scheme.act_formats if act != "none"]
            found += [packed_sample(case, n, device) for n in names for case in packed if runs(case, n, device)]
        return found

    return samples


def _routed_out(family: str) -> Callable[[str], list[Sample]]:
    def samples(device: str) -> list[Sample]:
        found = []
        for args, keywords in _routed(family)(device):
            hidden = _hidden_size(args, keywords)
            dtype = torch.bfloat16 if args[1] is not None else args[0].dtype
            out = torch.zeros(args[2].shape[0], hidden, dtype=dtype, device=device)
            found.append((args, {**keywords, "out": out}))
        return found

    return samples


def _monolithic(family: str) -> Callable[[str], list[Sample]]:
    def samples(device: str) -> list[Sample]:
        names = _backends(device)
        return [
            monolithic_sample(case, name, device)
            for name in names
            for case in cases(family)
            if not case.foreign and runs(case, name, device)
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
        ((logits, None, "renormalize", 4, 0, 0, 1.0, None, 2), {}),
        ((logits, bias, "minimax2", 4, 0, 0, 2.5, None, 1, torch.rand(5, 1, device=device)), {}),
        ((logits[:0], None, "sigmoid", 2), {"num_shared_experts": 3, "shared_expert_weights": logits[:0, :3].half()}),
    ]


def _route_hidden(device: str) -> list[Sample]:
    x, weight = torch.randn(5, 24, device=device), torch.randn(16, 24, device=device)
    bias, shared = torch.randn(16, device=device), torch.rand(5, 2, device=device)
    low = (x.bfloat16(), weight.bfloat16())
    return [
        ((x, weight, None, None, "renormalize", 4), {}),
        ((*low, bias, None, "default", 4), {"renormalize": True, "logits_dtype": torch.bfloat16}),
        ((*low, bias.bfloat16(), bias, "deepseek_v3", 4, 4, 2, 2.5), {}),
        ((x[:0], weight, None, None, "sigmoid", 2), {}),
        ((x.half(), weight.half(), None, None, "llama4", 1), {}),
        ((x.bfloat16(), weight, None, bias, "minimax2", 4, 0, 0, 2.5, None, None, 2, shared), {}),
    ]


def hidden_call(
    case: Case, backend: str, device: str, method: str = "renormalize", bias: bool = False
) -> dict[str, Any]:
    """The arguments of moe_hidden."""
    w, g = prepared(case, backend, device), torch.Generator().manual_seed(case.seed + 2)
    names = arguments("moe_hidden")[0]
    given = {name: getattr(w, name, None) for name in names[names.index("w13") :]}
    defaults = dict(zip(names[::-1], arguments("moe_hidden")[1][::-1], strict=False))
    given |= {name: defaults[name] for name in ("n_group", "topk_group", "routed_scaling_factor", "renormalize")}
    given |= {"routing_method": method, "top_k": case.top_k, "logits_dtype": torch.bfloat16 if bias else None}
    weight = torch.randn(case.experts, case.hidden, generator=g) * case.hidden**-0.5
    given["router_weight"] = weight.to(device, case.dtype)
    given["router_bias"] = torch.randn(case.experts, generator=g).to(device, case.dtype) if bias else None
    given["routing_bias"] = torch.randn(case.experts, generator=g).to(device) if method == "deepseek_v3" else None
    return {name: given.get(name) for name in names} | {"hidden_states": make_batch(case, device)[0]}


def _moe_hidden(device: str) -> list[Sample]:
    base = Case(hidden=96, inter=64, bias=True)
    cases = [
        (replace(base, scheme="nvfp4"), "renormalize", True),
        (replace(base, scheme="int4"), "deepseek_v3", False),
        (replace(base, scheme="fp8_block", act_format="fp8"), "default", False),
        (replace(base, scheme="none", hidden=40, inter=24), "sigmoid", True),
        (replace(base, scheme="mxfp4", top_k=1), "llama4", False),
        (replace(base, tokens=0), "renormalize", False),
    ]
    found = []
    for name in _backends(device):
        for case, method, bias in cases:
            if runs(case, name, device):
                found.append((tuple(hidden_call(case, name, device, method, bias).values()), {}))
    return found


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


def _quantize_mx(device: str) -> list[Sample]:
    x = torch.randn(5, 64, device=device)
    return [((x.bfloat16(),), {}), ((x, "floor"), {}), ((x[:0], "even"), {})]


def _quantize_fp8(device: str) -> list[Sample]:
    x = torch.randn(5, 200, device=device)
    scale = torch.tensor(100.0, device=device)
    return [((x.bfloat16(),), {}), ((x, scale), {}), ((x, None, 128), {}), ((x[:0],), {})]


def _quantize_int8(device: str) -> list[Sample]:
    x = torch.randn(5, 24, device=device)
    return [((x.half(),), {}), ((x, torch.rand(5, device=device) * 30), {}), ((x[:0],), {})]


def _routed_backward(device: str) -> list[Sample]:
    """The backward of routed samples, every scheme and backend; biases where there are any."""
    found = []
    for family in FAMILIES:
        names, defaults = arguments(f"{family}_moe_routed" if family else "moe_routed")
        for args, keywords in _routed(family)(device):
            given = dict(zip(names, (*args, *defaults[len(args) :]), strict=True)) | keywords
            element = given.pop("element", "")
            scheme = next(s for s in FAMILIES[family] if not element or s.element == element)
            dtype = torch.bfloat16 if args[1] is not None else args[0].dtype
            grad = torch.randn(args[2].shape[0], _hidden_size(args, keywords), device=device).to(dtype)
            wanted = [args[1] is None, True, given["w13_bias"] is not None, given["w2_bias"] is not None]
            given |= {"grad_output": grad, "scheme": scheme.name, "wanted": wanted}
            found.append((tuple(given.get(name) for name in arguments("moe_routed_backward")[0]), {}))
    return found


def _hidden_size(args: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    pack = ACT_FORMATS[keywords["act_format"]].pack if args[1] is not None else 1
    return args[0].shape[1] * pack


def grouped_sample(w: moe.PreparedWeights, projection: str, device: str = "cpu", transposed: bool = False) -> Sample:
    """Ten rows, of which expert 1 has none and the last ones are nobody's."""
    gated = w.activation.endswith("_no_mul") is False
    sizes = {
        "w13": (w.hidden_size, (2 if gated else 1) * w.intermediate_size),
        "w2": (w.intermediate_size, w.hidden_size),
    }
    x = torch.randn(10, sizes[projection][transposed], device=device)
    offsets = torch.linspace(0, 8, w.num_local_experts).int().to(device)
    parts = [getattr(w, f"{projection}{part}", None) for part in ("", "_scale", "_zero_point", "_scale_2")]
    own = (w.backend, w.scheme, projection, w.hidden_size, w.intermediate_size, gated, transposed, w.weight_policy)
    return (x, offsets, *parts, *own), {}


def _grouped_linear(device: str) -> list[Sample]:
    found = []
    for scheme, act, policy in (
        ("nvfp4", "none", "exact"),
        ("nvfp4", "fp8", "packed"),
        ("mxfp4", "fp8", "packed"),
        ("none", "none", "exact"),
        ("fp8_block", "none", "exact"),
        ("int4", "none", "exact"),
    ):
        case = Case(scheme=scheme, act_format=act, weight_policy=policy, hidden=96, inter=64)
        for name in _backends(device):
            if runs(case, name, device):
                w = prepared(case, name, device)
                found += [grouped_sample(w, "w13", device), grouped_sample(w, "w2", device, transposed=True)]
    return found


def lora_call(case: Case, backend: str, device: str = "cpu", adapters: int = 2) -> dict[str, Any]:
    """The arguments of moe_routed_lora."""
    w = prepared(case, backend, device)
    x, ids, weights = make_batch(case, device)
    lora = factors_of(make_raw(case), adapters, 3, torch.float32).to(device)
    names = arguments("moe_routed_lora")[0]
    given = {name: getattr(w, name, None) for name in names[names.index("w13") :]}
    given |= {f"lora_{name}": getattr(lora, name) for name in ("a13", "b13", "a2", "b2")}
    given["lora_scaling"] = torch.as_tensor(lora.scaling, device=device).reshape(adapters)
    if adapters > 1:
        given["lora_ids"] = (torch.arange(case.tokens, device=device) % (adapters + 1) - 1).int()
    return {"hidden_states": x, "topk_ids": ids, "topk_weights": weights, **given}


def lora_cases() -> list[Case]:
    base = Case(hidden=96, inter=64, bias=True)
    found = [replace(base, scheme=scheme) for scheme in ("nvfp4", "int4", "fp8_block")]
    found = [replace(case, act_format=SCHEMES[case.scheme].act_formats[-1]) for case in found]
    return [*found, replace(base, scheme="none", hidden=40, inter=24, foreign=True), replace(base, tokens=0)]


def _lora(device: str) -> list[Sample]:
    names = arguments("moe_routed_lora")[0]
    found = []
    for name in _backends(device):
        for i, case in enumerate(case for case in lora_cases() if runs(case, name, device)):
            given = lora_call(case, name, device, adapters=1 + i % 2)
            found.append((tuple(given[n] for n in names), {}))
    return found


def _lora_backward(device: str) -> list[Sample]:
    names = arguments("moe_routed_lora")[0]
    biases = [names.index(name) for name in ("w13_bias", "w2_bias")]
    found = []
    for args, keywords in _lora(device):
        wanted = [True, True, *(args[i] is not None for i in biases), *[True] * 4]
        found.append(((torch.randn_like(args[0]), *args, wanted), keywords))
    return found


def _ep_place(device: str) -> list[Sample]:
    ids = torch.tensor([[0, 3], [2, -1], [4, 1]], dtype=torch.int32, device=device)
    tables = moe.ExpertPlacement(((0, 1), (2, 3, 0)), "spread").tables(0).values()
    load = torch.zeros(4, dtype=torch.int64, device=device)
    return [((t, *(table.to(device) for table in tables), load, 1), {}) for t in (ids, ids[:0])]


def _exchange(device: str, max_tokens: int) -> tuple[Any, ...]:
    return "nccl", group_of_one(device), 1, max_tokens


def _ep_dispatch(device: str) -> list[Sample]:
    x, ids, weights = make_batch(Case(tokens=5), device)
    codes, scale = torch.ops.moeq.quantize_fp8(x, None, 32)
    return [
        ((x, None, ids, weights, *_exchange(device, 8)), {}),
        ((codes, scale, ids, weights, *_exchange(device, 5)), {}),
        ((x, None, ids, weights, *_exchange(device, 8)), {"slots": [4], "capacity": 6}),
        ((x[:0], None, ids[:0], weights[:0], *_exchange(device, 3)), {}),
    ]


def _ep_combine(device: str) -> list[Sample]:
    rows = torch.randn(8, 16, device=device)
    nowhere = torch.empty(0, 1, dtype=torch.int32, device=device)
    placed = torch.tensor([[1], [-1], [0]], dtype=torch.int32, device=device)
    return [
        ((rows, nowhere, 5, *_exchange(device, 8), torch.bfloat16), {}),
        ((rows.bfloat16(), nowhere, 0, *_exchange(device, 8), torch.float32), {}),
        ((rows, placed, 3, *_exchange(device, 9), torch.float32), {"slots": [4], "capacity": 8}),
        ((rows, nowhere, 5, *_exchange(device, 8), torch.bfloat16), {"wire_dtype": torch.float8_e4m3fn}),
    ]


def _ep_experts(device: str) -> list[Sample]:
    found = []
    for case in (Case(tokens=5), Case(tokens=5, scheme="none", bias=True), Case(tokens=5, scheme="int4")):
        x, ids, weights = make_batch(case, device)
        w = moe.prepare(make_raw(case, device), act_format="none", backend="reference")
        tables = [t.to(device) for t in moe.ExpertPlacement.contiguous(case.experts, 1).tables(0).values()]
        names = arguments("ep_experts")[0]
        given = {name: getattr(w, name, None) for name in names[names.index("w13") :]}
        given |= dict(zip(("first", "count", "slots"), tables, strict=True))
        given |= dict(zip(("transport", "group", "world_size", "max_tokens"), _exchange(device, 8), strict=True))
        given |= {"load": torch.zeros(case.experts, dtype=torch.int64, device=device), "rank": 0}
        given |= {"slots_of_ranks": [case.experts], "partial_dtype": torch.float32}
        for rows in (x, x[:0]):
            batch = {"hidden_states": rows, "topk_ids": ids[: len(rows)], "topk_weights": weights[: len(rows)]}
            found.append((tuple((given | batch)[name] for name in names), {}))
    return found


def host_layer(device: str) -> moe.HostExperts:
    """One layer a device for the whole process: its op knows it by a name."""
    if device not in _HOST_LAYERS:
        _HOST_LAYERS[device] = moe.HostExperts(make_raw(Case()), [1, 2], act_format="none", device=device, max_tokens=4)
    return _HOST_LAYERS[device]


_HOST_LAYERS: dict[str, moe.HostExperts] = {}


def _host_experts(device: str) -> list[Sample]:
    layer, (x, places, weights) = host_layer(device), make_batch(Case(), device)
    return [
        ((x, places, weights, layer.name), {}),
        ((x, places, weights, layer.name, torch.float32), {}),
        ((x[:0], places[:0], weights[:0], layer.name), {}),
    ]


SAMPLES: dict[str, Callable[[str], list[Sample]]] = {
    "quantize_mxfp4": _quantize_mx,
    "quantize_mxfp8": _quantize_mx,
    "quantize_fp8": _quantize_fp8,
    "quantize_int8": _quantize_int8,
    "route": _route,
    "route_hidden": _route_hidden,
    "moe_hidden": _moe_hidden,
    "moe_routed_backward": _routed_backward,
    "moe_routed_lora": _lora,
    "moe_routed_lora_backward": _lora_backward,
    "grouped_linear": _grouped_linear,
    "quantize_nvfp4": _quantize_nvfp4,
    "dynamic_gscale_nvfp4": _dynamic_gscale,
    "ep_place": _ep_place,
    "ep_dispatch": _ep_dispatch,
    "ep_combine": _ep_combine,
    "ep_experts": _ep_experts,
    "host_experts": _host_experts,
    "swizzle_scale": _swizzle,
    "unswizzle_scale": _unswizzle,
}
for _family in FAMILIES:
    _prefix = f"{_family}_" if _family else ""
    SAMPLES[f"{_prefix}moe"] = _monolithic(_family)
    SAMPLES[f"{_prefix}moe_routed"] = _routed(_family)
    SAMPLES[f"{_prefix}moe_routed.out"] = _routed_out(_family)


def overload(name: str) -> Any:
    """torch.ops.moeq.<name>, `.default` where no overload is named."""
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.moeq, packet), suffix or "default")


def as_bytes(value: Any) -> Any:
    """e4m3 tensors as uint8, which every op takes as well; anything else as it is."""
    is_e4m3 = isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
    return value.view(torch.uint8) if is_e4m3 else value


def results_of(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Shape, dtype and bytes of what a call returns, or writes into `out`; tensors on meta have no bytes."""
    returned = overload(name)(*args, **keywords)
    results = keywords.get("out", returned)
    return [_plain(t) for t in (results if isinstance(results, tuple) else (results,))]


def _plain(t: torch.Tensor) -> tuple[Any, ...]:
    if t.device.type == "meta" or not t.numel():
        return (t.shape, t.dtype, b"")
    return (t.shape, t.dtype, bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))

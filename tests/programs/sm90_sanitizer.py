"""The Hopper kernels at small shapes, a group of them a process, to be run by scripts/sanitize_sm90.sh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from lora_cases import factors_of
from problems import Case, make_batch, make_raw
from routing_oracle import WITH_BIAS, draw, draw_bias, groups_of
from sm90_cases import in_tiles, make_call, of_a_checkpoint, relative_error, run_on
from tolerances import BF16, fp8_sums_bound, layer_bound, rounded_int4

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90_bf16
from torch_moe_ops.backends.sm90 import fp8_products
from torch_moe_ops.core.routing_methods import ROUTING_METHODS
from torch_moe_ops.routing.reference import route_reference
from torch_moe_ops.tuning import tuned_kernels

Fields = dict[str, Any]
SMALL: Fields = {"hidden": 128, "inter": 64}
QUANTIZED: Fields = {"act_format": "nvfp4", "a1": 500.0, "a2": 300.0}
HALF: Fields = {"dtype": torch.float16}
# Of weights, and "-a8" where activations are rounded to fp8 or mxfp8 -> what a call differs in. Kernels for int4 are one
# for each form of its scales (SM90_FORMATS).
FORMATS: dict[str, tuple[Fields, ...]] = {
    "nvfp4": (
        {},
        QUANTIZED | {"a1": None, "a2": None, "top_k": 3},
        {"bias": True},
        QUANTIZED,
        {"foreign": True, "experts": 9, "top_k": 3},
        {"top_k": 1, "router_weight_on_input": True, "activation": "relu2_no_mul"},
        QUANTIZED | {"a1": "expert", "a2": "expert", "activation": "swigluoai", "out_dtype": torch.float32},
        QUANTIZED | {"activation": "relu2_no_mul", "hidden": 192},
    ),
    "nvfp4-a8": (
        {"act_format": "fp8"},
        {"act_format": "fp8", "activation": "relu2_no_mul", "hidden": 192, "foreign": True, "experts": 9, "top_k": 3},
        {"act_format": "fp8", "a1": "expert", "bias": True},
    ),
    "mxfp4-a8": (
        {"act_format": "mxfp8"},
        {"act_format": "fp8", "a1": 90.0, "a2": "expert"},
        {"act_format": "fp8", "a1": "expert", "bias": True},
    ),
    "mxfp4": (
        {"bias": True},
        {"activation": "gelu_no_mul", "hidden": 192, "inter": 96},
        {"activation": "swigluoai"},
        {"hidden": 96, "inter": 96},
    ),
    # Float16 hidden states: of NVFP4 as they are in narrow and wide tiles, else as two bfloat16 each; and rounded.
    "nvfp4-f16": (
        HALF,
        HALF | {"activation": "relu2_no_mul", "hidden": 224, "foreign": True, "experts": 9, "top_k": 3},
        HALF | {"activation": "gelu", "bias": True},
        HALF | QUANTIZED | {"a1": None, "a2": None},
        HALF | {"act_format": "fp8", "a1": "expert", "bias": True},
    ),
    "mxfp4-f16": (
        HALF | {"bias": True, "hidden": 96, "inter": 96},
        HALF | {"activation": "relu2_no_mul", "out_dtype": torch.bfloat16},
        HALF | {"act_format": "mxfp8"},
    ),
    "fp8_block-f16": (
        HALF | {"hidden": 320, "inter": 192},
        HALF | {"activation": "relu2_no_mul", "hidden": 192},
        HALF | {"act_format": "fp8", "hidden": 320, "inter": 320},
    ),
    "int4": (
        {"weights": {"group": 32}},
        {"weights": {"group": 32, "scale_dtype": torch.float16, "zero": True}},
        {"weights": {"group": 64}, "activation": "swigluoai"},
    ),
    # Of which some kernels scale sums.
    "int4-sums": (
        {"weights": {"group": 64, "zero": True}},
        {"weights": {"group": 64, "scale_dtype": torch.float32, "zero": True}},
        {"weights": {"group": -1, "zero": True}, "activation": "relu2_no_mul"},
        {"weights": {"group": 64, "scale_dtype": torch.float16}},
        {"weights": {"group": -1, "scale_dtype": torch.float16, "zero": True}, "activation": "swigluoai"},
    ),
    "int4-a8": (
        {"act_format": "fp8", "weights": {"group": 32}},
        {"act_format": "fp8", "weights": {"group": 64}, "a1": "expert", "bias": True},
        {"act_format": "fp8", "weights": {"group": 64, "scale_dtype": torch.float16}, "activation": "relu2_no_mul"},
    ),
    "int4-sums-a8": (
        {"act_format": "fp8", "weights": {"group": 32, "zero": True}},
        {"act_format": "fp8", "weights": {"group": 64, "zero": True}, "a2": 30.0},
        {"act_format": "fp8", "weights": {"group": 64, "scale_dtype": torch.float32, "zero": True}},
    ),
    "fp8": ({"weights": {"scales": "channel"}}, {"weights": {"scales": "half"}, "activation": "relu2_no_mul"}),
    "fp8_block": ({"bias": True, "activation": "swigluoai"}, {"hidden": 320, "foreign": True, "experts": 9}),
    "fp8-a8": (
        {"act_format": "fp8", "weights": {"scales": "channel"}},
        {"act_format": "fp8", "weights": {"scales": "half"}, "a1": "expert", "a2": 30.0, "activation": "relu2_no_mul"},
    ),
    "fp8_block-a8": (
        {"act_format": "fp8", "hidden": 320, "inter": 320, "activation": "relu2_no_mul"},
        {"act_format": "fp8", "hidden": 320, "inter": 320, "foreign": True, "experts": 9, "top_k": 3},
        {"act_format": "fp8", "bias": True, "activation": "swigluoai"},
        {"act_format": "fp8", "inter": 192, "activation": "gelu"},
    ),
    "int8": (
        {"weights": {"group": -1}, "hidden": 320},
        {"weights": {"group": -1}, "activation": "relu2_no_mul", "foreign": True},
    ),
    # Few steps along K for one token, too: under racecheck a kernel that reports many pairs outlasts its waits.
    "mxfp8": (
        {"hidden": 320, "inter": 192},
        {"activation": "relu2_no_mul", "hidden": 192, "inter": 96},
        {"activation": "gelu"},
    ),
    "mxfp8-a8": (
        {"act_format": "mxfp8", "hidden": 320, "inter": 192},
        {"act_format": "mxfp8", "activation": "relu2_no_mul", "hidden": 192, "inter": 96},
        {"act_format": "mxfp8", "activation": "gelu", "foreign": True, "experts": 9, "top_k": 3},
    ),
}
KERNELS = (*tuned_kernels.KERNELS, "gathered")
# Calls of "gathered", which is for layers without biases.
GATHERED: dict[str, tuple[Fields, ...]] = {
    "nvfp4": ({}, {"foreign": True, "out_dtype": torch.float32}),
    "nvfp4-a8": ({"act_format": "fp8"}, {"act_format": "fp8", "a1": 90.0, "activation": "swigluoai"}),
    "mxfp4": ({}, {"activation": "swigluoai", "foreign": True}),
    "int4": ({"weights": {"group": 32}}, {"weights": {"group": 64}, "foreign": True}),
    "int4-sums": ({"weights": {"group": 64, "zero": True}}, {"weights": {"group": 64, "scale_dtype": torch.float32}}),
}
# Numbers of tokens of a kernel: what decides between the versions that it has
# (benchmarks/results/hopper_notebook.md, sections 3 to 5).
TOKENS: dict[str, tuple[Fields, ...]] = {
    "decode": (
        {"tokens": 1, "hidden": 1024, "inter": 768, "experts": 9, "top_k": 6},
        {"tokens": 3, "hidden": 320, "inter": 192},
        {"tokens": 8, "top_k": 6, "experts": 20},  # more slots than a warp sorts
        {"tokens": 9},
        {"tokens": 12, "experts": 40, "top_k": 3},  # W4A8 without grid barriers, as slots are no more than experts
        {"tokens": 33},
    ),
    "gathered": (
        {"tokens": 9, "experts": 9},
        {"tokens": 32, "top_k": 8, "experts": 200},  # a block multiplies rows of three experts
        {"tokens": 31, "top_k": 7, "experts": 8, "hidden": 8192},  # room for four rows, an expert has 27
    ),
    "slim": ({"tokens": 50},),
    "narrow": ({"tokens": 70, "hidden": 192},),
    "wide": ({"tokens": 170, "inter": 192},),
}
UNQUANTIZED: tuple[Fields, ...] = (
    {"tokens": 170, "inter": 192, "bias": True},
    {"tokens": 70, "activation": "relu2_no_mul"},
    {"tokens": 5, "hidden": 80, "inter": 48, "activation": "swigluoai"},
)
# Of more slots a token than the combine's blocks know at a time, rows of two blocks.
SUMS: tuple[Fields, ...] = tuple(
    {"tokens": 9, "experts": 48, "top_k": 40, "hidden": 2112, "out_dtype": dtype}
    for dtype in (torch.float32, torch.bfloat16)
)
# INT4 weights on fp8 tensor cores: tiles of up to 144, 72, 256 and 160 tokens; last steps of one tile of K or two.
INT4_PRODUCTS: tuple[Fields, ...] = (
    {"tokens": 930, "experts": 45, "hidden": 1088, "inter": 192, "weights": {"group": -1}},
    {"tokens": 170, "experts": 90, "hidden": 576, "weights": {"group": -1, "zero": True}, "bias": True},
    {"tokens": 200, "experts": 1, "top_k": 1, "hidden": 2176, "inter": 2048, "weights": {"group": 128}},
    {"tokens": 170, "hidden": 192, "weights": {"group": -1, "zero": True}, "bias": True},
    {"tokens": 400, "experts": 3, "inter": 128, "weights": {"group": 128}, "activation": "relu2_no_mul"},
    {"tokens": 400, "experts": 3, "weights": {"group": -1, "scale_dtype": torch.float16}, "activation": "gelu"},
    {"tokens": 300, "foreign": True, "experts": 9, "top_k": 3, "weights": {"group": -1, "zero": True}},
)
# Layers called from router logits: tokens, scheme, what `prepare` is told, and sizes that are not the usual ones.
LAYERS: dict[str, tuple[tuple[int, str, Fields], ...]] = {
    "packed": tuple(
        (tokens, "nvfp4", {"act_format": "fp8", "weight_policy": "packed"}) for tokens in (150, 70, 13, 1, 3)
    ),
    "packed-mxfp4": tuple(
        (tokens, "mxfp4", {"act_format": "fp8", "weight_policy": "packed"}) for tokens in (150, 70, 13, 1, 3)
    ),
    "packed-large": tuple(  # main loops that know their widths
        (130, scheme, {"act_format": "fp8", "weight_policy": "packed", "sizes": (1024, 4096)})
        for scheme in ("nvfp4", "mxfp4")
    ),
    "folded": ((70, "nvfp4", {"act_format": "fp8", "weight_policy": "folded"}),),
    "fp8": tuple((tokens, "fp8", {"act_format": "fp8", "backend": "cuda_sm90_fp8"}) for tokens in (40, 1, 3)),
    "fp8_block": tuple(
        (tokens, "fp8_block", {"act_format": "fp8", "backend": "cuda_sm90_fp8"})
        for tokens in (1, 3, 40, 500)  # 500: tokens are the first factor
    ),
    "logits": ((3, "nvfp4", {"act_format": "none"}), (70, "mxfp4", {})),
}


# Of layers with adapters: tokens, which decide between the kernels, scheme, rank.
ADAPTERS = {
    "adapters": ((90, "nvfp4", 16), (1000, "mxfp4", 40), (90, "mxfp4", 40), (1000, "nvfp4", 16)),
    "adapters-slim": ((9, "nvfp4", 16), (9, "mxfp4", 40), (5, "nvfp4", 40), (5, "mxfp4", 16)),
}
OF_ADAPTERS = 6e-3  # tests/backends/triton/test_triton_lora.py


def run_call(kernel: str, scheme: str, fields: Fields) -> str | None:
    """None if the kernel's result is the oracle's, else what is wrong."""
    call = of_a_checkpoint(make_call(scheme, **SMALL | fields))
    out = run_on(kernel, in_tiles(call))
    if fields.get("foreign"):
        return None if not out[-1].any() else "experts of another rank contribute"
    error = relative_error(out, call)
    return None if error < (rounded_int4(call.act_format) if scheme == "int4" else BF16) else f"{error:.1e}"


def run_bf16(fields: Fields) -> str | None:
    call = make_call("none", **SMALL | fields)
    out = torch.full(call.hidden_states.shape, float("nan"), dtype=call.out_dtype, device=call.w2.device)
    cuda_sm90_bf16.run_kernel(call, out)
    error = relative_error(out, call)
    return None if error < BF16 else f"{error:.1e}"


def run_int4_products(fields: Fields) -> str | None:
    call = of_a_checkpoint(make_call("int4", "fp8", **SMALL | fields))
    out = torch.full(call.hidden_states.shape, float("nan"), dtype=call.out_dtype, device=call.w2.device)
    fp8_products.run(in_tiles(call), out)
    if fields.get("foreign"):
        return None if not out[-1].any() else "experts of another rank contribute"
    error = relative_error(out, call)
    bound = fp8_sums_bound(call.topk_ids.numel() * call.w2.shape[2] * 8, call.out_dtype)
    return None if error < bound else f"{error:.1e}"


def run_layer(tokens: int, scheme: str, settings: Fields) -> str | None:
    g = torch.Generator().manual_seed(0)
    settings = dict(settings)
    hidden, inter = settings.pop("sizes", (192, 64))
    w13 = torch.randn(6, 2 * inter, hidden, generator=g) / hidden**0.5
    w2 = torch.randn(6, hidden, inter, generator=g) / inter**0.5
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), scheme)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    logits, routing = torch.randn(tokens, 6, generator=g), moe.Routing("sigmoid_renorm", 2)
    want = moe.fused_moe(x, logits, moe.prepare(raw, **settings | {"backend": "reference"}), routing=routing).double()
    w = moe.prepare(raw.to("cuda"), **settings)
    if not w.backend.startswith("cuda_sm90"):
        return f"ran on {w.backend}"
    error = (moe.fused_moe(x.cuda(), logits.cuda(), w, routing=routing).cpu().double() - want).norm() / want.norm()
    bound = layer_bound(w.backend, w.act_format, x.dtype, tokens * 2 * w.intermediate_size)
    return None if error < bound else f"{error:.1e}"


def run_adapters(tokens: int, scheme: str, rank: int) -> str | None:
    """Adapters of a layer of the kernels of many tokens (gemm_rows.cu)."""
    case = Case(tokens=tokens, experts=5, top_k=3, hidden=192, inter=128, scheme=scheme, bias=True, foreign=True)
    raw, batch = make_raw(case), make_batch(case)
    lora = factors_of(raw, 1, rank, torch.bfloat16)
    want, out = (
        moe.fused_moe_routed(
            *(t.to(device) for t in batch),
            moe.prepare(raw, act_format="none", backend=backend, device=device),
            lora=lora.to(device),
        )
        for backend, device in (("reference", "cpu"), ("cuda_sm90", "cuda"))
    )
    error = (out.cpu().double() - want.double()).norm() / want.double().norm()
    return None if error < OF_ADAPTERS else f"{error:.1e}"


def run_routing(method: str, experts: int, groups: tuple[int, int]) -> str | None:
    logits, top_k = draw(9, experts, seed=1), 1 if method == "llama4" else 6
    bias = draw_bias(experts, seed=1) if method in WITH_BIAS else None
    options = (method, top_k, *groups_of(method, groups))
    ids, _ = torch.ops.moeq.route(logits.cuda(), None if bias is None else bias.cuda(), *options)
    return None if torch.equal(ids.cpu(), route_reference(logits, bias, *options)[0]) else "other ids"


def run_router(experts: int, hidden: int, tokens: int, method: str) -> str | None:
    """Product and choice in one launch; sums in a cluster's shared memory."""
    g = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(tokens, hidden, generator=g).bfloat16(),
        torch.randn(experts, hidden, generator=g).bfloat16(),
    )
    top_k = min(experts, 6)
    ids, _, logits = torch.ops.moeq.route_hidden(x.cuda(), weight.cuda(), None, None, method, top_k)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if ((logits.cpu() - exact).abs() > size * 2.0**-20).any():
        return "other logits"
    return None if torch.equal(ids, route_reference(logits, None, method, top_k)[0]) else "other ids"


Run = tuple[Callable[..., "str | None"], tuple[Any, ...]]


def groups(kernels: list[str]) -> dict[str, list[Run]]:
    """Name of a group -> its runs, long ones first: routing, layers, kernels with tokens that choose their versions."""
    found: dict[str, list[Run]] = {}
    if "layers" in kernels:
        shapes = ((60, (5, 3)), (256, (8, 4)), (1000, (0, 0)))
        found["routing"] = [(run_routing, (method, *shape)) for method in ROUTING_METHODS for shape in shapes]
        routers = ((128, 256, 3), (60, 1000, 17), (256, 1536, 9), (3, 8, 1))
        found["router"] = [(run_router, (*shape, "renormalize")) for shape in routers]
        found["int4-products"] = [(run_int4_products, (fields,)) for fields in INT4_PRODUCTS]
        found["sums"] = [(run_call, ("slim", "nvfp4", fields)) for fields in SUMS]
        found["bf16"] = [(run_bf16, (fields,)) for fields in UNQUANTIZED]
        found |= {name: [(run_adapters, adapters) for adapters in each] for name, each in ADAPTERS.items()}
        found |= {name: [(run_layer, layer) for layer in layers] for name, layers in LAYERS.items()}
    for kernel in (k for k in KERNELS if k in kernels):
        for tokens in TOKENS[kernel]:
            for name, calls in (GATHERED if kernel == "gathered" else FORMATS).items():
                scheme = name.partition("-")[0]
                runs: list[Run] = [(run_call, (kernel, scheme, tokens | fields)) for fields in calls]
                found[f"{kernel}-{tokens['tokens']}:{name}"] = runs
    return found


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", help='"list", which prints their names, or one of them')
    parser.add_argument("--few", action="store_true", help="the first two runs of the group, for slow tools")
    parser.add_argument("--kernels", default=",".join((*KERNELS, "layers")), help="what to list")
    args = parser.parse_args()
    found = groups(args.kernels.split(","))
    if args.group == "list":
        print(*found)
        return 0
    runs = found[args.group][: 2 if args.few else None]
    wrong = [f"{rest}: {text}" for run, rest in runs if (text := run(*rest)) is not None]
    torch.cuda.synchronize()
    print("\n".join(wrong) or f"{len(runs)} results right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

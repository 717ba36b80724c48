"""Writes docs/ops.md from the schemas: every op, its schema, and what each argument means.

    python scripts/op_docs.py [--write]

Without --write it prints the page. A test fails when an op or an argument has no text here, or when
the page is out of date.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.core.schemas import FAMILIES, SCHEMAS, arguments
from torch_moe_ops.core.schemes import Scheme

PAGE = Path(__file__).parent.parent / "docs" / "ops.md"

HEADER = """# Ops of `torch.ops.moeq`

Made by `scripts/op_docs.py` from the schemas. All ops are pure (except `.out`, and the counter of `ep_place` and
`ep_experts`), return fresh contiguous tensors, have fakes, and are capturable where their backend is. Errors are
`RuntimeError`s of the form `moeq::<op>: <argument> must <requirement>, got <value>`. Pairs hold exactly:
`X_moe(x, logits, ...) == X_moe_routed(x, *route(logits, ...), ...)`.

Weights, block scales and packed hidden states of dtype float8_e4m3fn may also be given as uint8 of the same shape: the
same bits, the same result (e8m0 scales are uint8 anyway).

The expert ops, `route` and `route_hidden` have gradients: to hidden states, routing weights, router logits, a router's
weight and bias, w13_bias and w2_bias, and to the factors of adapters.
Packed weights and scales have none, nor have the `.out` overloads and the quantizers: asking for one in a backward
pass is an error that names op and argument, as is forward-mode AD. Rounding of activations passes gradients through as
if it were not there (straight-through). How to train with them: [howto/train.md](howto/train.md).

The value that an expert op computes, and every rounding step, is in [numerics.md](numerics.md).
Shapes of weights and scales are those of the linear layout; a backend with another layout takes what `prepare` made.
"""

WEIGHTS = {
    "nvfp4": "e2m1 codes, an e4m3 scale per 16 of K, a float32 factor per matrix in the alphas",
    "mxfp4": "e2m1 codes, an e8m0 scale per 32 of K",
    "mxfp8": "e4m3 codes, an e8m0 scale per 32 of K",
    "mxfp6": "e3m2 or e2m3 codes, one a byte, an e8m0 scale per 32 of K",
    "mxint4": "signed 4-bit integers stored as value + 8, a bfloat16 scale per 32 of K",
    "int4": "4-bit integers with a scale per group of 32, 64, 128 or the whole row, optional zero points (GPTQ, AWQ)",
    "fp8": "e4m3 codes, a float32 scale per tensor, half of w13, or row",
    "fp8_block": "e4m3 codes, a float32 scale per 128x128 tile (gate and up tiled separately)",
    "int8": "int8 codes, a scale per row or per group, optional zero points",
    "": "bfloat16, float16 or float32, the dtype of the hidden states",
}

OTHER_OPS = {
    "route": "Router logits to expert ids and weights. Ties go to the lowest index; a NaN ranks last; ids are always "
    "top_k distinct experts. `routed_scaling_factor` is folded into the weights, once. Shared experts follow in "
    "columns of their own, with their weights as given.",
    "route_hidden": "Hidden states to expert ids and weights, and the router's logits: `route` with the product in "
    "front. Logits are float32 sums of the operands as they are, rounded once to logits_dtype, and `route` sees them "
    "so. On Hopper one launch does it for few tokens of bfloat16, and a token's bits depend on no other token of the "
    "launch; elsewhere it is a product and a launch of routing. Where operands and logits have one dtype, that product "
    "is `torch.nn.functional.linear`.",
    "moe_hidden": "Router and experts of any scheme, from hidden states and the router's weights: `route_hidden` and "
    "the scheme's routed op, whose results it gives together.",
    "moe_routed_backward": "Gradients of every routed op, from its arguments and the gradient of its output; its "
    "backward pass calls it. What the forward pass made in between is made again. Sums in float32, in a fixed order.",
    "moe_routed_lora": "Experts of any scheme with the caller's routing, and low-rank adapters beside them: "
    "gate and up get `scaling * B13 @ A13 @ x`, the result `scaling * B2 @ A2 @ h` besides, of x and h as they are "
    "before `act_format` rounds them. Experts are decoded a few at a time, whatever the backend. Gradients go to the "
    "factors too. `fused_moe_routed` calls it where it gets a `moe.Lora`.",
    "moe_routed_lora_backward": "Gradients of moe_routed_lora, from its arguments and the gradient of its output.",
    "grouped_linear": "A projection of packed experts on rows sorted by expert, weight-only, without its bias; rows of "
    "nobody give zeros. Its gradient is the op itself, transposed. `moe.grouped_linear` takes prepared weights.",
    "quantize_nvfp4": "NVFP4 codes and block scales of activations: value = code * scale / gscale.",
    "quantize_mxfp4": "MXFP4 codes, two a byte, and e8m0 scales: value = code * 2^(scale - 127).",
    "quantize_mxfp8": "MXFP8: e4m3 codes and e8m0 scales: value = code * 2^(scale - 127).",
    "quantize_fp8": "e4m3 codes and float32 scales that multiply: per token, per `group` of K, or from `gscale`.",
    "quantize_int8": "int8 codes and float32 scales that multiply: one per token, or from `gscale`.",
    "dynamic_gscale_nvfp4": "A gscale per row for quantize_nvfp4: 2688 / amax, at most 2^118; 1 of zeros, NaN of NaN.",
    "ep_place": "Experts as the router numbers them to the slots where they lie; `load` counts them.",
    "ep_dispatch": "The rows of all ranks of a group to this one: all of them, or with a `capacity` those that have an "
    "expert here. Collective. Rows that stand for no token have the expert -1; an absent scale comes back as [0, 0].",
    "ep_combine": "The ranks' partial rows back to the ranks of the tokens, added in float32 in ascending rank order. "
    "Collective.",
    "ep_experts": "`ep_place`, `ep_dispatch`, the routed op of a scheme and `ep_combine` in one, of unquantized hidden "
    "states; with transport p2p, kernels that can do so read tokens, and write partial rows, in other GPUs' memory. "
    "Collective. `num_experts` and `local_expert_offset` count slots.",
    "host_experts": "A layer whose experts lie partly on a device and partly on the host; both parts run at once, and "
    "are added in float32 on the device. `moe.HostExperts` makes such a layer and calls this op.",
    "swizzle_scale": "Block scales in the 128x4 tiling that NVIDIA's kernels read, zeros in the padding.",
    "unswizzle_scale": "Inverse of swizzle_scale.",
}

ARGUMENTS = {
    "hidden_states": "[num_tokens, hidden_size] bfloat16, float16 or float32; or packed as act_format stores them.",
    "hidden_states_scale": "None, or the scales of packed hidden states in the linear layout "
    "(nvfp4: float8_e4m3fn [num_tokens, hidden_size/16]; fp8, int8: float32 [num_tokens, 1], fp8_block one per 128; "
    "MX: uint8 [num_tokens, hidden_size/32]).",
    "topk_ids": "[num_tokens, top_k] int32 (`fused_moe_routed` also takes int64), global expert ids; one outside "
    "[local_expert_offset, + local experts) "
    "contributes nothing, whatever its value.",
    "topk_weights": "[num_tokens, top_k] float32, final multipliers.",
    "router_logits": "[num_tokens, num_experts] bfloat16, float16 or float32; computed on in float32.",
    "router_weight": "[num_experts, hidden_size] bfloat16, float16 or float32, as a linear has it.",
    "router_bias": "None or [num_experts], the same dtypes: added to the logits, before they are rounded.",
    "logits_dtype": "None (float32), or what the model rounds its logits to before it chooses.",
    "routing_bias": "None or float32 [num_experts]: added for the selection only.",
    "w13": "[local experts, 2 * intermediate_size, hidden_size storage], rows [gate; up]; only up where not gated.",
    "w13_scale": "Scales of w13; multiply.",
    "w13_zero_point": "None, or shaped like w13_scale: subtracted from the codes.",
    "g1_alphas": "float32 [local experts], or [local experts, 2] for gate and up: multiply the accumulators of w13. "
    "The weights' factor, times the input scale where a1_gscale is given.",
    "w13_bias": "None or float32 [local experts, rows of w13], in real units.",
    "w2": "[local experts, hidden_size, intermediate_size storage].",
    "w2_scale": "Scales of w2; multiply.",
    "w2_zero_point": "None, or shaped like w2_scale.",
    "g2_alphas": "float32 [local experts]: multiply the accumulators of w2.",
    "w2_bias": "None or float32 [local experts, hidden_size].",
    "a1_gscale": "None (dynamic, one per token), or float32 [] or [local experts]: multiplies the hidden states before "
    "they are quantized.",
    "a2_gscale": "The same for the intermediate.",
    "lora_a13": "None, or [local experts, adapters * r, hidden_size] bfloat16, float16 or float32: the ranks of the "
    "adapters side by side.",
    "lora_b13": "With lora_a13: [local experts, rows of w13, adapters * r], rows [gate; up].",
    "lora_a2": "None, or [local experts, adapters * r2, intermediate_size].",
    "lora_b2": "With lora_a2: [local experts, hidden_size, adapters * r2].",
    "lora_scaling": "float32 [adapters]: multiplies both products of an adapter. It gets no gradient.",
    "lora_ids": "int32 [num_tokens]: the adapter of each token, another number (-1) for none; None: the only one.",
    "lora_merged": "The weights hold the one adapter already: the layer runs as without it, and the factors get the "
    "gradients of a straight-through estimate.",
    "grad_output": "[num_tokens, hidden_size], any float dtype: gradient of what the routed op returned.",
    "scheme": "Which weights these are, a name of `torch_moe_ops.core.schemes.SCHEMES`.",
    "wanted": "Which of the results are asked for, in their order; the others are empty.",
    "backend": "The name under which the weights were prepared.",
    "act_format": "How GEMM operands are made from activations.",
    "activation": "A name of [this table](#activations); gated unless it ends in `_no_mul`.",
    "swiglu_alpha": "None: the activation's own constant.",
    "swiglu_beta": "None: the activation's own constant.",
    "swiglu_limit": "None: the activation's own constant (often no limit).",
    "num_experts": "Global number of experts; 0: as many as are needed.",
    "local_expert_offset": "Global id of the first local expert.",
    "element": "Which element the weights hold.",
    "router_weight_on_input": "top_k 1 only: the weight multiplies the token, before quantization, and not the output.",
    "weight_policy": '"exact"; for nvfp4 and mxfp4 weights with fp8 activations also "packed" and "folded".',
    "out_dtype": "None: the dtype of unquantized hidden states, bfloat16 for packed ones.",
    "routing_method": "A name of [this table](#routing-methods).",
    "top_k": "Experts a token, 1 to 32.",
    "n_group": "Groups of experts, 0 or 1: none.",
    "topk_group": "Groups that stay.",
    "routed_scaling_factor": "Multiplies the weights.",
    "renormalize": "None: as the method says.",
    "num_shared_experts": "Experts that every token goes to, with ids from num_experts on: each gets a column behind "
    "the top_k, 32 columns at most in all. Not with llama4.",
    "shared_expert_weights": "None (1), or [num_tokens, num_shared_experts] bfloat16, float16 or float32: the weights "
    "of these columns. Has a gradient.",
    "x": "[..., K] bfloat16, float16 or float32; of grouped_linear [rows, K] (its result's columns where transposed).",
    "offsets": "int32 [experts], ascending: the row behind each expert's last one.",
    "weight": "w13 or w2 in the layout of the backend.",
    "weight_scale": "Its scales.",
    "weight_zero_point": "None, or shaped like them.",
    "weight_scale_2": "float32 [experts], or [experts, 2] for gate and up; multiplies. nvfp4 alone.",
    "projection": '"w13" or "w2".',
    "hidden_size": "Of the layer.",
    "intermediate_size": "Of the layer, without padding.",
    "is_gated": "Whether w13 has gate and up rows.",
    "transposed": "x @ W instead of x @ W.T.",
    "first": "int32 [num_experts]: where in `slots` the places of an expert begin.",
    "count": "int32 [num_experts]: how many places follow; row t takes number (t + rank) modulo count.",
    "slots_of_ranks": "Experts on each rank.",
    "partial_dtype": "In which partial rows travel: float32, bfloat16 or float16.",
    "slots": "ep_place, ep_experts: int32 [places], slots of all ranks numbered through. "
    "ep_dispatch, ep_combine with a capacity: experts on each rank.",
    "places": "int32 [num_tokens, top_k]: the slots of a token's experts, as ep_place makes them; what is no slot "
    "contributes nothing.",
    "layer": "The name that a `HostExperts` of this process has (`HostExperts.name`).",
    "load": "int64 [num_experts], contiguous: grows by the number of times that each expert is asked for.",
    "rank": "Of this process in the group.",
    "partial_rows": "[world_size * (capacity or max_tokens), hidden_size] bfloat16, float16 or float32.",
    "wire_dtype": "None: partial rows travel as they are; float8_e4m3fn: as codes, with a float32 scale for 128 values "
    "(transport nccl).",
    "positions": "int32 [num_tokens, world_size]: the row of a rank's part that has a token's result, -1: none; "
    "[0, world_size] without a capacity. ep_dispatch makes it.",
    "num_tokens": "Of this rank.",
    "transport": 'A name of `torch_moe_ops.transports.registry.TRANSPORTS`: "nccl".',
    "world_size": "Ranks of the group.",
    "max_tokens": "The largest number of rows on any rank; the same on every rank.",
    "capacity": "Rows from one rank to one other at most; more are an error on every rank, told by the host. 0: every "
    "row goes to every rank.",
    "tp_group": "Name of a group of ranks that have other parts of the same experts, and the same tokens; empty: none.",
    "tp_size": "Ranks of tp_group.",
    "gscale": "float32, [] or one per row [...]: multiplies x before it is rounded.",
    "rule": 'Of the block exponent: "rceil" (never clips), "floor" (OCP), "even".',
    "group": "quantize_fp8: values of K that share a scale; 0: the whole row; the last group may be partial. "
    "ep_dispatch, ep_experts, ep_combine: name of a process group of torch.distributed.",
    "scale": "[..., rows, cols], any dtype of 1 or 2 bytes.",
    "swizzled": "[..., padded rows * padded cols].",
    "rows": "Before padding.",
    "cols": "Before padding.",
}


def _summary(name: str) -> str:
    if name in OTHER_OPS:
        return OTHER_OPS[name]
    base = name.removesuffix(".out")
    family = re.fullmatch(r"(?:(\w+)_)?moe(?:_routed)?", base)
    assert family, name
    schemes = FAMILIES[family[1] or ""]
    kind = "Experts with routing that the caller supplies" if base.endswith("routed") else "Router and experts"
    into = ", written into `out` (contiguous, sharing memory with no argument)" if name.endswith(".out") else ""
    return f"{kind}{into}. Weights: {WEIGHTS[family[1] or '']}. {_formats(schemes[0])}"


def _formats(scheme: Scheme) -> str:
    return f"`act_format`: {', '.join(f'`{a}`' for a in scheme.act_formats)}."


# Whose routers do that. Not a list of all.
MODELS = {
    "default": "DeepSeek-V2, OLMoE, Qwen2-MoE",
    "renormalize": "Qwen3, Mixtral, gpt-oss",
    "renormalize_naive": "`renormalize` but for roundings: transformers' order of operations in Qwen3 and Mixtral",
    "deepseek_v3": "DeepSeek-V3, GLM-4.5, Kimi-K2",
    "llama4": "Llama 4; the weight multiplies the token, not the result",
    "minimax2": "MiniMax-M2",
    "deepseek_v4": "DeepSeek-V4",
}
SCORES = {"identity": "logits", "sqrtsoftplus": "sqrt(softplus)"}

# g: gate, u: up; x: the only half where there is no gate. Limits clamp g from above, u on both sides.
FORMULAS = {
    "silu": "silu(g) * u, clamped before",
    "swigluoai": "g * sigmoid(alpha * g) * (u + beta), clamped before",
    "swiglustep": "min(silu(g), limit) * clamp(u)",
    "situ": "alpha * tanh(g / alpha) * sigmoid(g) * beta * tanh(u / beta)",
    "gelu": "gelu(g) * u",
    "gelu_tanh": "gelu(g) * u by its tanh approximation",
    "relu2": "relu(g)^2 * u",
    "silu_no_mul": "silu(x)",
    "gelu_no_mul": "gelu(x)",
    "relu2_no_mul": "relu(x)^2",
    "identity_no_mul": "x",
}


def routing_table() -> list[str]:
    """A line a method."""
    lines = [
        "| `routing_method` | experts are chosen by | their weights | divided by their sum | also takes | models |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for m in METHODS.values():
        chosen = SCORES.get(m.score, m.score) + (" plus bias, where one is given" if m.takes_bias else "")
        weights = f"{m.weight} of the chosen logits" if m.weight else SCORES.get(m.score, m.score)
        if m.weight == "softmax":
            weights = "softmax over the chosen logits, which adds up to 1"
        divided = ("yes" if m.renormalizes else "no") + (", unless asked otherwise" if m.can_choose_renormalize else "")
        takes = {
            "groups": m.takes_groups,
            "routed_scaling_factor": m.takes_scaling_factor,
            "top_k 1 alone": m.max_top_k == 1,
        }
        also = ", ".join(name for name, it_does in takes.items() if it_does)
        lines.append(f"| `{m.name}` | {chosen} | {weights} | {divided} | {also} | {MODELS.get(m.name, '')} |")
    return lines


def activation_table() -> list[str]:
    """A line an activation."""
    lines = ["| `activation` | value | constants that a caller may set, with their defaults |", "|---|---|---|"]
    for a in ACTIVATIONS.values():
        own = {name: getattr(a, name) for name in a.takes}
        constants = ", ".join(f"{name} {'none' if math.isinf(value) else f'{value:g}'}" for name, value in own.items())
        lines.append(f"| `{a.name}` | {FORMULAS[a.name]} | {constants} |")
    return lines


def page() -> str:
    """The whole text of docs/ops.md."""
    parts = [HEADER, "## Arguments\n", *(f"- `{name}`: {text}" for name, text in sorted(ARGUMENTS.items())), ""]
    parts += ["## Routing methods\n", *routing_table(), ""]
    parts += [
        "## Activations\n",
        "g and u are the gate and the up half of the first GEMM's result, x its only half where",
    ]
    parts += ["there is no gate. A limit clamps g from above and u on both sides.\n", *activation_table(), ""]
    for name in sorted(SCHEMAS):
        parts += [f"## `{name}`\n", _summary(name) + "\n", f"```\n{name}{SCHEMAS[name]}\n```\n"]
    return "\n".join(parts)


def missing() -> list[str]:
    """Arguments, ops and activations without a text."""
    named = {a for name in SCHEMAS for a in arguments(name)[0]}
    families = {name for name in FAMILIES if name not in WEIGHTS}
    formulas = sorted(ACTIVATIONS.keys() ^ FORMULAS.keys()) + sorted(MODELS.keys() - METHODS.keys())
    return sorted(named - ARGUMENTS.keys()) + sorted(families) + formulas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()

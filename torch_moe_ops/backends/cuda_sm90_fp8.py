"""The `cuda_sm90_fp8` backend: e4m3 weights on fp8 activations, on Hopper's tensor cores.

Schemes fp8 (a scale for each row, half of the rows, or matrix) and fp8_block (128 x 128, with activations in groups of
128): few tokens by the Triton kernels of `triton_fp8`, which read the same tiles, very few by the decode kernel where
it is the faster one, or Triton is missing or does not take the layer; it multiplies the codes exactly. Many by the
kernels of the `cuda_sm90_folded` backend. Between the two, blocks of small experts take the exact kernels of
`cuda_sm90`, which read the same tiles, too. docs/hopper.md says how exact the tensor cores' sums are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.backends import cuda_sm90, cuda_sm90_w4a8, triton
from torch_moe_ops.backends.cuda_sm90_w4a8 import DECODE_TOKENS, PREFILL, sizes_reason
from torch_moe_ops.backends.registry import Backend, Requirement, formats, register
from torch_moe_ops.backends.sm90 import w4a8_layout as tiled
from torch_moe_ops.backends.sm90.byte_formats import prepare, restore, specs
from torch_moe_ops.backends.sm90.common import NEEDS
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import Sm90, Sm90Few, Sm90W4a8
from torch_moe_ops.core.layout import Layout
from torch_moe_ops.core.problem import STANDARD, Problem
from torch_moe_ops.tuning.tuned_kernels import KERNELS

# Slots that an expert has in the mean, up to which Triton's kernels are the faster ones (benchmarks/results/
# hopper_notebook.md, section 10): where it is small (its w2 has fewer bytes than LARGE_BYTES), and where it is large.
LARGE_BYTES, FEW_SLOTS_SMALL, FEW_SLOTS = Sm90W4a8.LARGE_VALUES, 8.0, 4.0
# Of blocks where w2 is small: beyond how many and up to how many slots the exact kernels are the fastest (four models,
# benchmarks/results/h200_early_inputs.jsonl).
EXACT_SLOTS, EXACT_KERNEL = (3.5, 28.0), KERNELS.index("slim")
# Values that the hidden states of all tokens have, up to which the decode kernel has room for them for sure.
DECODE_VALUES = 1 << 14
# Where experts are small, bytes of w2 that all slots of a call read, up to which it takes 0.87 to 1.02 of the time of
# Triton's kernels, beyond 1.00 to 1.06 (Qwen3's, OLMoE's and DeepSeek-V2-Lite's sizes, h200_fp8_rules.jsonl).
DECODE_BYTES = 101_000_000
# Where experts are large, Triton's kernels are faster than it beyond: Mixtral with scales of rows, at 4 tokens
# (benchmarks/results/h200_fp8_few_auto.jsonl).
DECODE_TOKENS_LARGE = 3
WEIGHTS = {"fp8": "rows", "fp8_block": "blocks"}  # scheme -> what the op calls its weights


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    if by_decode(call):
        run_cuda(call, out)
    elif by_triton(call):
        triton.run(call, out)
    elif by_exact(call):
        cuda_sm90.run_kernel(call, out, EXACT_KERNEL)
    else:
        run_cuda(call, out)


def run_cuda(call: ExpertsCall, out: Tensor, decode_tokens: int = DECODE_TOKENS) -> None:
    """`run` without Triton. decode_tokens: up to so many are for the decode kernel, where it takes the layer."""
    cuda_sm90_w4a8.run(WEIGHTS[call.scheme], call, out, decode_tokens)


def by_decode(call: ExpertsCall) -> bool:
    """Whether the decode kernel runs a call, whoever takes more tokens: where it is the faster one for as many."""
    tokens, top_k = call.topk_ids.shape
    if tokens not in tokens_of_decode(call.scheme, call.hidden_states.shape[1], top_k, call.w2.stride(0)):
        return False
    # Tokens that are codes, or have a scale for each expert, are for other kernels.
    return call.hidden_states_scale is None and (call.a1_gscale is None or call.a1_gscale.ndim == 0)


def tokens_of_decode(scheme: str, hidden_size: int, top_k: int, bytes2: int) -> range:
    """The numbers of tokens that are for the decode kernel (benchmarks/results/hopper_notebook.md, section 10).

    bytes2: of an expert's w2 in tiles.
    """
    small = bytes2 < LARGE_BYTES
    if scheme == "fp8_block" and not small:
        return range(0)
    fastest = DECODE_TOKENS if small else DECODE_TOKENS_LARGE
    most = min(fastest, DECODE_VALUES // hidden_size, Sm90Few.MAX_SLOTS // top_k)
    if small:
        most = min(most, DECODE_BYTES // (top_k * bytes2))
    return range(2 if small else 1, most + 1)


def by_triton(call: ExpertsCall) -> bool:
    """Whether the Triton kernels run a call: where they take the layer and are the faster ones for as many tokens."""
    slots = call.topk_ids.numel() / call.all_experts()
    hidden_size = call.hidden_states.shape[1]
    return slots <= _few_slots(call.scheme, call.w2.stride(0), hidden_size) and _triton_takes(hidden_size)


def by_exact(call: ExpertsCall) -> bool:
    """Whether the exact kernels run a call that Triton's do not: where they are the faster ones for as many tokens."""
    slots = call.topk_ids.numel() / call.all_experts()
    hidden_size = call.hidden_states.shape[1]
    if slots > EXACT_SLOTS[1] or not _some_are_exact(call.scheme, call.w2.stride(0), hidden_size):
        return False
    # Without Triton's kernels they follow the decode kernel.
    return slots > EXACT_SLOTS[0] if _triton_takes(hidden_size) else call.topk_ids.shape[0] > DECODE_TOKENS


def exact_tokens(problem: Problem, bytes2: int) -> int:
    """Up to so many tokens are for the exact kernels, or 0 for none. bytes2: of an expert's w2 in tiles."""
    if problem.top_k is None or not _some_are_exact(problem.scheme, bytes2, problem.hidden_size):
        return 0
    return int(EXACT_SLOTS[1] * problem.num_experts) // problem.top_k


def _some_are_exact(scheme: str, bytes2: int, hidden_size: int) -> bool:
    """Whether any number of tokens of a layer is for the exact kernels."""
    return scheme == "fp8_block" and bytes2 < LARGE_BYTES and hidden_size % Sm90.BYTE_HIDDEN_MULTIPLE == 0


def _few_slots(scheme: str, bytes2: int, hidden_size: int) -> float:
    """Up to so many slots of an expert, in the mean, are for the Triton kernels."""
    if bytes2 >= LARGE_BYTES:
        return FEW_SLOTS
    return EXACT_SLOTS[0] if _some_are_exact(scheme, bytes2, hidden_size) else FEW_SLOTS_SMALL


def triton_tokens(problem: Problem, bytes2: int) -> int:
    """Up to so many tokens are for the Triton kernels; top_k is known. bytes2: of an expert's w2 in tiles."""
    few = _few_slots(problem.scheme, bytes2, problem.hidden_size)
    return int(few * problem.num_experts) // (problem.top_k or 1)


def _triton_takes(hidden_size: int) -> bool:
    return hidden_size % tiled.TILE_K == 0 and triton.package_reason() is None


def _numbers(tokens: range) -> str:
    return f"{tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else f"{tokens[0]}"


def _few(problem: Problem, bytes2: int) -> tuple[int, str]:
    """Up to how many tokens neither exact kernels nor those on fp8 tensor cores run, and what does. For `_notes`."""
    decode = f"decode kernel up to {DECODE_TOKENS} tokens, while its buffers fit an SM"
    if not _triton_takes(problem.hidden_size):
        return DECODE_TOKENS, decode
    by_decode = tokens_of_decode(problem.scheme, problem.hidden_size, problem.top_k or 1, bytes2)
    if problem.top_k is None:
        return DECODE_TOKENS, "Triton's kernels" + (" or the decode kernel" if by_decode else "") + " for few tokens"
    most = triton_tokens(problem, bytes2)
    text = f"Triton's kernels up to {most} tokens"
    if by_decode:
        text += f", but the decode kernel for {_numbers(by_decode)}"
    if max(most, exact_tokens(problem, bytes2)) < DECODE_TOKENS:  # more slots than are Triton's: `run_cuda` decides
        return DECODE_TOKENS, f"{text}, then the {decode}"
    return most, text


def _notes(problem: Problem) -> str:
    """Which kernels a number of tokens gets."""
    if not problem.hidden_size or not problem.intermediate_size:  # not known
        return f"few tokens by Triton's or the decode kernel, as sizes say, then {PREFILL}, whose sums have 14 bits"
    bytes2 = problem.hidden_size * tiled.TILE_K * tiled.tiles(problem.intermediate_size, tiled.TILE_K)
    most, few = _few(problem, bytes2)
    exact = exact_tokens(problem, bytes2)
    between = f"exact prefill kernels up to {exact}, then " if exact > most else ""
    if problem.top_k is None and _some_are_exact(problem.scheme, bytes2, problem.hidden_size):
        between = "exact prefill kernels for some, then "
    return f"{few}, then {between}{PREFILL}, whose sums have 14 bits"


register(
    Backend(
        name="cuda_sm90_fp8",
        layout=Layout(
            "cuda_sm90_fp8_tiles_v1",
            specs,
            lambda scheme, w2_shape: w2_shape[2] * tiled.TILE_K,
            stored={"fp8": torch.uint8, "fp8_block": torch.uint8},
            pads_hidden=True,
        ),
        requires=(*NEEDS, formats({"fp8": ("fp8",), "fp8_block": ("fp8",)}), Requirement(sizes_reason)),
        prepare=prepare,
        restore=restore,
        run=run,
        hidden_dtypes=(torch.bfloat16,),
        notes=_notes,
        accuracy=STANDARD,
    )
)

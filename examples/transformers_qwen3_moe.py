"""NVFP4 experts in plain transformers: they stay packed and run through torch.ops.moeq.

    python examples/transformers_qwen3_moe.py [CHECKPOINT]
    python examples/transformers_qwen3_moe.py --synthetic [--layers 4] [--tokens 1,64] [--out FILE]

A ModelOpt export must lie beside `expected.safetensors` (input_ids, and the logits of the same model on dequantized
weights), as those in tests/data do. --synthetic makes a random model instead (on a GPU with the layer sizes of
Qwen3-30B-A3B), compiles it with mode="reduce-overhead" and times its CUDA graph against the eager transformers model.
Exit status 1: the logits are out of bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import torch_moe_ops as moe
import torch_moe_ops.transformers as moeq_transformers
from torch_moe_ops.transformers.attach import find_experts, remove_parameters
from torch_moe_ops.transformers.implementation import register_implementation

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
# "none" (W4A16): the same weights, so only the order of float32 sums differs. "nvfp4" (W4A4) also rounds what
# enters each expert GEMM to 4 bits, which is about a tenth of a small random model's logits.
MAX_ERROR = {"none": 1e-5, "nvfp4": 0.2}
# In bfloat16 both models round after every operation, each in its own order; now and then a router then chooses
# another expert where two are nearly equal.
MAX_ERROR_BF16 = 0.1


def from_checkpoint(folder: Path) -> int:
    expected = load_file(folder / "expected.safetensors")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    input_ids = expected["input_ids"].to(device)

    # After register(), from_pretrained reads the export. Linears outside the experts are dequantized.
    moeq_transformers.register(act_format="none")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    print(f"checkpoint  {folder.name}: {type(model).__name__}, experts: {model.config._experts_implementation}")

    failed = False
    for act_format, bound in MAX_ERROR.items():
        # Needed here only to change act_format; any model with the experts interface may be given experts so.
        attached = moeq_transformers.attach_experts(model, folder, act_format=act_format)
        if act_format == "none":
            report_memory(list(attached.values()))
            print(moe.explain(next(iter(attached.values()))))
        print(f"compiling with act_format {act_format!r} ...", flush=True)
        start = time.perf_counter()
        # One graph for the whole model, experts included.
        logits = torch.compile(forward_of(model), fullgraph=True)(input_ids)
        seconds = time.perf_counter() - start
        error = relative_error(logits, expected["logits_dequant"].to(device))
        failed |= not error <= bound
        print(
            f"{act_format:<11} logits {error:.2e} from the dequantized model's (allowed {bound:.0e}), {seconds:.1f} s"
        )
    return int(failed)


def forward_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def relative_error(logits: Tensor, reference: Tensor) -> float:
    return ((logits.double() - reference.double()).norm() / reference.double().norm()).item()


def report_memory(attached: list[moe.PreparedWeights]) -> None:
    packed = sum(t.numel() * t.element_size() for w in attached for t in w.tensors().values())
    values = sum(w.num_experts * 3 * w.hidden_size * w.intermediate_size for w in attached)
    print(
        f"experts     {len(attached)} layers, {packed / 1024:.0f} KiB packed, {values * 2 / 1024:.0f} KiB in bfloat16"
    )


def random_model(layers: int, device: torch.device) -> Any:
    """Qwen3-MoE in bfloat16: on a GPU with the layers of Qwen3-30B-A3B, elsewhere with small ones."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    if device.type != "cuda":
        sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(num_hidden_layers=layers, vocab_size=8192, norm_topk_prob=True, **sizes, **heads)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def quantize_in_place(model: Any) -> dict[str, moe.RawWeights]:
    """Round every expert to NVFP4 and leave the dequantized values in the model; the packed weights by module."""
    packed = {}
    for found in find_experts(model):
        weights = (found.module.gate_up_proj, found.module.down_proj)
        packed[found.name] = moe.quantize_experts(*(w.data for w in weights), "nvfp4")
        for parameter, values in zip(weights, moe.dequantize_experts(packed[found.name]), strict=True):
            parameter.data.copy_(values)
    return packed


def attach(model: Any, packed: dict[str, moe.RawWeights]) -> list[moe.PreparedWeights]:
    """What attach_experts does with a checkpoint's experts."""
    register_implementation()
    attached = []
    for found in find_experts(model):
        w = moe.prepare(packed[found.name], act_format="none")
        remove_parameters(found.module)
        found.module.moeq_weights = moeq_transformers.ExpertWeights(w)
        attached.append(w)
    model.set_experts_implementation("moeq")
    return attached


def median_ms(function: Callable[[Tensor], Tensor], ids: Tensor, calls: int) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function(ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def graph_launches(function: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[int, int]:
    """CUDA graphs and single kernels that one call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(ids)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    return names.count("cudaGraphLaunch"), sum(name.startswith("cudaLaunchKernel") for name in names)


def synthetic(layers: int, all_tokens: list[int], out: Path | None) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = random_model(layers, device)
    packed = quantize_in_place(model)
    inputs = {tokens: torch.randint(0, 8192, (1, tokens), device=device) for tokens in all_tokens}
    theirs = model.config._experts_implementation
    calls = 20 if device.type == "cuda" else 3
    eager = forward_of(model)
    before = {tokens: (eager(ids), median_ms(eager, ids, calls)) for tokens, ids in inputs.items()}

    attached = attach(model, packed)
    report_memory(attached)
    print(moe.explain(attached[0]))
    records, failed = [], False
    for tokens, ids in inputs.items():
        record = measure(model, ids, *before[tokens], calls)
        record |= {"tokens": tokens, "layers": layers, "eager_experts": theirs, "backend": attached[0].backend}
        records.append(record)
        failed |= not record["error"] <= MAX_ERROR_BF16 or record["graphs"] not in (1, None)
        print(
            f"tokens {tokens:<6} eager transformers ({theirs}) {record['eager_ms']:.2f} ms, compiled "
            f"{record['compiled_ms']:.2f} ms; logits {record['error']:.1e} apart (allowed {MAX_ERROR_BF16:.0e}); "
            f"{record['graphs']} CUDA graph, {record['kernels']} single launches",
            flush=True,
        )
    if out is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        command = ["python", "examples/transformers_qwen3_moe.py", *sys.argv[1:]]
        plain = [Path(word).name if Path(word).is_absolute() else word for word in command]  # no machine's paths
        what = {"device": name, "torch": torch.__version__, "command": " ".join(plain)}
        out.write_text(json.dumps({**what, "records": records}, indent=1) + "\n")
    return int(failed)


def measure(model: Any, ids: Tensor, expected: Tensor, eager_ms: float, calls: int) -> dict[str, Any]:
    """Compile for this number of tokens (fullgraph: a graph break raises), compare and time."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(forward_of(model), fullgraph=True, dynamic=False, mode="reduce-overhead")
    start = time.perf_counter()
    for _ in range(3):  # compile, record the CUDA graph, replay it
        logits = compiled(ids)
    error = relative_error(logits, expected)
    seconds = time.perf_counter() - start
    graphs, kernels = graph_launches(compiled, ids) if ids.is_cuda else (None, None)
    return {
        "eager_ms": round(eager_ms, 3),
        "compiled_ms": round(median_ms(compiled, ids, calls), 3),
        "error": error,
        "graphs": graphs,
        "kernels": kernels,
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        "compile_s": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="NVFP4 experts in a transformers model.")
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--synthetic", action="store_true", help="a random model, timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", default="1,64", help="with --synthetic: comma list")
    parser.add_argument("--out", type=Path, help="with --synthetic: write the figures as JSON")
    args = parser.parse_args()
    if args.synthetic:
        return synthetic(args.layers, [int(t) for t in args.tokens.split(",")], args.out)
    return from_checkpoint(args.checkpoint)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

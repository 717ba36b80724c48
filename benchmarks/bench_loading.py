#!/usr/bin/env python3
"""Peak memory and time of from_pretrained on a CPU, for every checkpoint format, beside transformers' own loading.

    python benchmarks/bench_loading.py --out benchmarks/results/loading_cpu.json

Checkpoints of a Qwen3-MoE model are written into a temporary folder (about 10 GB are written and removed again), each
loaded by a process of its own. "peak" is the largest growth of anonymous memory while loading, sampled; "result" is
what the loaded model holds; "cpu_seconds" are those that the process computed, "seconds" those that passed, with
whatever else ran. The last line is the unquantized model in bfloat16, loaded by transformers alone; gpt-oss MXFP4 is a
gpt-oss model of the same sizes, all others are Qwen3-MoE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from peak_memory import Peak  # noqa: E402
from quantized_models import FORMATS  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig  # noqa: E402

import torch_moe_ops as moe  # noqa: E402

UNQUANTIZED = "bfloat16 (transformers)"
GPT_OSS = "gpt-oss MXFP4"  # one tensor for the experts of a layer
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 24}
TINY = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2, "num_hidden_layers": 1}


def config_of(format_name: str, sizes: dict[str, int]) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    common = {"vocab_size": 1000, "num_experts_per_tok": 2, "tie_word_embeddings": False, **heads}
    if format_name != GPT_OSS:
        return Qwen3MoeConfig(**common, **sizes)
    names = {"moe_intermediate_size": "intermediate_size", "num_experts": "num_local_experts"}
    return GptOssConfig(**common, **{names.get(name, name): size for name, size in sizes.items()})


def write(folder: Path, format_name: str, sizes: dict[str, int]) -> None:
    """A checkpoint whose experts are all alike: one is encoded, the others are copies of it."""
    config = config_of(format_name, sizes)
    folder.mkdir(parents=True)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    tensors = {name: torch.randn(t.shape).bfloat16() for name, t in names.items() if ".experts." not in name}
    experts, settings = _gpt_oss_experts(sizes) if format_name == GPT_OSS else _experts(format_name, sizes)
    for layer in range(sizes["num_hidden_layers"]):
        root = f"model.layers.{layer}.mlp.experts"
        tensors |= {f"{root}.{name}": t.clone(memory_format=torch.contiguous_format) for name, t in experts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["GptOssForCausalLM" if format_name == GPT_OSS else "Qwen3MoeForCausalLM"]
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **settings}))


def _experts(format_name: str, sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """One layer's tensors by their names behind "experts.", and what the config says of them."""
    hidden, inter = sizes["hidden_size"], sizes["moe_intermediate_size"]
    settings: dict[str, Any] = {}
    parts = {}
    for projection, shape in {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}.items():
        weight = torch.randn(shape) * 0.02
        parts[projection] = {"weight": weight.bfloat16()}
        if format_name != UNQUANTIZED:
            encode, said = FORMATS[format_name]
            parts[projection], settings = encode(weight)[0], {"quantization_config": said}
    experts = range(sizes["num_experts"])
    stored = [(f"{projection}_proj.{name}", t) for projection, of in parts.items() for name, t in of.items()]
    return {f"{expert}.{name}": t for expert in experts for name, t in stored}, settings


def _gpt_oss_experts(sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same as gpt-oss has it."""
    experts, hidden, inter = sizes["num_experts"], sizes["hidden_size"], sizes["moe_intermediate_size"]
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
        tensors[f"{name}_bias"] = torch.zeros(experts, rows, dtype=torch.bfloat16)
    return tensors, {"quantization_config": {"quant_method": "mxfp4"}}


def measure(folder: Path, format_name: str) -> dict[str, Any]:
    """In a process of its own: load a tiny model of the format, so that everything is imported, then the other."""
    if format_name != UNQUANTIZED:
        import torch_moe_ops.transformers as moeq_transformers

        moeq_transformers.register()
    AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.bfloat16)
    begin, computed = time.perf_counter(), time.process_time()
    with Peak() as peak:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    seconds, computed = time.perf_counter() - begin, time.process_time() - computed - peak.cpu_seconds
    result = model.get_memory_footprint()
    file = (folder / "model" / "model.safetensors").stat().st_size
    mib = {"file_mib": file, "result_mib": result, "peak_mib": peak.growth}
    line = {"format": format_name, **{name: round(size / 2**20, 1) for name, size in mib.items()}}
    return {
        **line,
        "peak_over_result": round(peak.growth / result, 3),
        "cpu_seconds": round(computed, 2),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join((*FORMATS, GPT_OSS, UNQUANTIZED)))
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.formats)))
        return
    sizes = {**SIZES, "num_hidden_layers": args.layers}
    versions = {"torch": torch.__version__, "library": moe.__version__, "threads": torch.get_num_threads()}
    result: dict[str, Any] = {"sizes": sizes, "versions": versions, "lines": []}
    for format_name in args.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "tiny", format_name, TINY)
            write(Path(folder) / "model", format_name, sizes)
            command = [sys.executable, __file__, "--measure", folder, "--formats", format_name]
            # Threads that wait for work would compute while they do.
            environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            done = subprocess.run(command, check=True, env=environment, **pipes)
        line = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(line), flush=True)
        result["lines"].append(line)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

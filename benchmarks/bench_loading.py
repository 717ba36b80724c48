#!/usr/bin/env python3
"""Peak memory and time of from_pretrained on a CPU, for every checkpoint format, beside transformers' own loading.

    python benchmarks/bench_loading.py --out benchmarks/results/loading_cpu.json

Checkpoints of a Qwen3-MoE model are written into a temporary folder (about 10 GB are written and removed again), each
loaded by a process of its own. "peak" is the largest growth of anonymous memory while loading, sampled; "result" is
what the loaded model holds. The last line is the unquantized model in bfloat16, loaded by transformers alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from quantized_models import FORMATS  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3MoeConfig  # noqa: E402

import torch_moe_ops as moe  # noqa: E402

UNQUANTIZED = "bfloat16 (transformers)"
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 24}
TINY = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2, "num_hidden_layers": 1}


def config_of(sizes: dict[str, int]) -> Qwen3MoeConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3MoeConfig(vocab_size=1000, num_experts_per_tok=2, tie_word_embeddings=False, **heads, **sizes)


def write(folder: Path, format_name: str, sizes: dict[str, int]) -> None:
    """A checkpoint whose experts are all alike: one is encoded, the others are copies of it."""
    config = config_of(sizes)
    folder.mkdir(parents=True)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    tensors = {name: torch.randn(t.shape).bfloat16() for name, t in names.items() if ".experts." not in name}
    hidden, inter = sizes["hidden_size"], sizes["moe_intermediate_size"]
    settings: dict[str, Any] = {}
    parts = {}
    for projection, shape in {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}.items():
        weight = torch.randn(shape) * 0.02
        parts[projection] = {"weight": weight.bfloat16()}
        if format_name != UNQUANTIZED:
            encode, said = FORMATS[format_name]
            parts[projection], settings = encode(weight)[0], {"quantization_config": said}
    for layer in range(sizes["num_hidden_layers"]):
        for expert in range(sizes["num_experts"]):
            for projection, stored in parts.items():
                root = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
                tensors |= {
                    f"{root}.{part}": t.clone(memory_format=torch.contiguous_format) for part, t in stored.items()
                }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3MoeForCausalLM"]
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **settings}))


class Peak:
    """The largest anonymous memory of this process while the block runs, beyond what it was at its begin; in bytes."""

    def __enter__(self) -> Peak:
        self.begin = self.most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.begin


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status must have RssAnon (Linux 4.5 or later)")


def measure(folder: Path, format_name: str) -> dict[str, Any]:
    """In a process of its own: load a tiny model of the format, so that everything is imported, then the other."""
    if format_name != UNQUANTIZED:
        import torch_moe_ops.transformers as moeq_transformers

        moeq_transformers.register()
    AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.bfloat16)
    begin = time.perf_counter()
    with Peak() as peak:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    seconds, result = time.perf_counter() - begin, model.get_memory_footprint()
    file = (folder / "model" / "model.safetensors").stat().st_size
    mib = {"file_mib": file, "result_mib": result, "peak_mib": peak.growth}
    line = {"format": format_name, **{name: round(size / 2**20, 1) for name, size in mib.items()}}
    return {**line, "peak_over_result": round(peak.growth / result, 3), "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join((*FORMATS, UNQUANTIZED)))
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
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(line), flush=True)
        result["lines"].append(line)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

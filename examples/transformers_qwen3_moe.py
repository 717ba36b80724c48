"""A ModelOpt NVFP4 export in plain transformers: experts stay packed and run through torch.ops.moeq.

    python examples/transformers_qwen3_moe.py [CHECKPOINT]

The checkpoint must lie beside `expected.safetensors` (input_ids, and the logits of the same model on dequantized
weights), as those in tests/data do. Exit status 1: the logits are out of bounds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_moe_ops as moe
import torch_moe_ops.transformers as moeq_transformers

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
# "none" (W4A16): the same weights, so only the order of float32 sums differs. "nvfp4" (W4A4) also rounds what
# enters each expert GEMM to 4 bits, which is about a tenth of a small random model's logits.
MAX_ERROR = {"none": 1e-5, "nvfp4": 0.2}


def main(folder: Path) -> int:
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
            report_memory(attached)
            print(moe.explain(next(iter(attached.values()))))
        print(f"compiling with act_format {act_format!r} ...", flush=True)
        start = time.perf_counter()
        logits = compiled_logits(model, input_ids)
        seconds = time.perf_counter() - start
        reference = expected["logits_dequant"].to(device).double()
        error = ((logits.double() - reference).norm() / reference.norm()).item()
        failed |= not error <= bound
        print(
            f"{act_format:<11} logits {error:.2e} from the dequantized model's (allowed {bound:.0e}), {seconds:.1f} s"
        )
    return int(failed)


def compiled_logits(model: torch.nn.Module, input_ids: Tensor) -> Tensor:
    """One graph for the whole model, experts included."""
    compiled = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True)
    return compiled(input_ids)


def report_memory(attached: dict[str, moe.PreparedWeights]) -> None:
    packed = sum(t.numel() * t.element_size() for w in attached.values() for t in w.tensors().values())
    values = sum(w.num_experts * 3 * w.hidden_size * w.intermediate_size for w in attached.values())
    print(
        f"experts     {len(attached)} layers, {packed / 1024:.0f} KiB packed, {values * 2 / 1024:.0f} KiB in bfloat16"
    )


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT))

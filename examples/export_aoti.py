"""torch.export with a dynamic token dimension, and an AOTInductor package of a module that holds prepared weights.

    python examples/export_aoti.py [CHECKPOINT] [--layer N] [--package FILE.pt2]

A package is bound to the backend that its weights were prepared for (the graph names it, and the weights lie in
its layout): prepare and export again for another kind of machine. The process that loads a package must have
imported torch_moe_ops, which defines the op. Where loading a package fails with std::bad_cast or a segmentation fault,
the compiler has linked libstdc++ from an archive: see scripts/cxx_local_archives.sh.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_moe_ops as moe

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
MAX_TOKENS = 4096


class MoELayer(nn.Module):
    def __init__(self, weights: moe.PreparedWeights, routing: moe.Routing) -> None:
        super().__init__()
        self.weights = weights
        self.routing = routing

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        return moe.fused_moe(hidden_states, router_logits, self.weights, routing=self.routing)


def batch(w: moe.PreparedWeights, tokens: int) -> tuple[Tensor, Tensor]:
    hidden_states = torch.randn(tokens, w.hidden_size, device=w.device).bfloat16()
    return hidden_states, torch.randn(tokens, w.num_experts, device=w.device)


def median_us(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> float:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        function(*args)
        if args[0].is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description="Export one MoE layer and package it.")
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--package", type=Path, default=None, help="default: a temporary file")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    w = moe.prepare(moe.load_experts(args.checkpoint, layer=args.layer), device=device)
    layer = MoELayer(w, moe.Routing("renormalize", top_k=2)).eval()
    tokens = torch.export.Dim("num_tokens", min=2, max=MAX_TOKENS)
    program = torch.export.export(layer, batch(w, 8), dynamic_shapes=({0: tokens}, {0: tokens}))
    calls = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("moeq.")]
    print(f"exported    {args.checkpoint.name}, layer {args.layer}: {', '.join(calls)}, bound to backend {w.backend!r}")

    with tempfile.TemporaryDirectory() as folder:
        print("compiling the package ...", flush=True)
        start = time.perf_counter()
        target = str(args.package or Path(folder) / "moe_layer.pt2")
        package = torch._inductor.aoti_compile_and_package(program, package_path=target)
        seconds = time.perf_counter() - start
        held = sum(t.numel() * t.element_size() for t in w.tensors().values())
        size = Path(package).stat().st_size
        print(f"package     {size / 1024:.0f} KiB ({held / 1024:.0f} KiB of weights in the module), {seconds:.1f} s")
        loaded = torch._inductor.aoti_load_package(package)

        worst = 0.0
        for count in (2, 7, 100):
            inputs = batch(w, count)
            eager, exported, compiled = layer(*inputs), program.module()(*inputs), loaded(*inputs)
            differences = [(eager - other).abs().max().item() for other in (exported, compiled)]
            worst = max(worst, *differences)
            times = f"eager {median_us(layer, inputs):.0f} us, package {median_us(loaded, inputs):.0f} us"
            print(f"{count:>4} tokens: {times}")
    print(f"difference  {worst:.1e} at most between eager, exported program and package (0 expected: the same kernel)")
    return 0 if worst == 0 else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

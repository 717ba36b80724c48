"""Packages a layer with AOTInductor, loads the package and compares; a process of its own, as a fault ends it.

usage: python tests/programs/aoti_package.py FILE.pt2     (FILE.pt2 is written)
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from problems import Case, make_raw

import torch_moe_ops as moe

CASE = Case(act_format="nvfp4", input_scale="tensor", experts=4, top_k=2)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = moe.prepare(make_raw(CASE), act_format="nvfp4", backend="cpu")

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return moe.fused_moe(x, logits, self.weights, routing=moe.Routing("renormalize", 2))


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, CASE.hidden).bfloat16(), torch.randn(tokens, CASE.experts)


def main(path: str) -> None:
    layer = Layer()
    tokens = torch.export.Dim("num_tokens", min=2, max=1024)
    program = torch.export.export(layer, _inputs(7), dynamic_shapes=({0: tokens}, {0: tokens}))
    loaded = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))
    for count in (2, 7, 33):
        inputs = _inputs(count)
        torch.testing.assert_close(loaded(*inputs), layer(*inputs), rtol=0, atol=0)
    print("equal")


if __name__ == "__main__":
    faulthandler.enable()
    torch.manual_seed(0)
    main(sys.argv[1])

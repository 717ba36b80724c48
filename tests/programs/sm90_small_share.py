"""Router and experts in one launch of fewer thread blocks than tokens, which only a small share under MPS has: what it
chooses, and its output, are those of two launches. scripts/mps_streams.sh starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from sm90_cases import in_tiles, make_call, run_on

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90.router import RouterProduct

EXPERTS, TOP_K, HIDDEN, INTER = 16, 4, 512, 128
ROUTING = (None, "renormalize", TOP_K, 0, 0, 1.0, None)


EMPTY = torch.empty


def filled(*size: Any, **options: Any) -> torch.Tensor:
    """torch.empty, so that what a kernel does not write is seen."""
    return EMPTY(*size, **options).fill_(77)


def main() -> int:
    """0 if all is as it should be."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inter": INTER}
    call = in_tiles(make_call("nvfp4", tokens=8, **sizes))
    weight = (torch.randn(EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5).bfloat16()
    wrong = []
    for tokens in range(1, 9):
        of_tokens = call._replace(hidden_states=call.hidden_states[:tokens].contiguous())
        ids, weights, logits = torch.ops.moeq.route_hidden(
            of_tokens.hidden_states, weight, None, *ROUTING, torch.float32
        )
        want = ids, weights, run_on("decode", of_tokens._replace(topk_ids=ids, topk_weights=weights))
        got, out = torch.empty_like(logits), torch.full_like(of_tokens.hidden_states, float("nan"))
        with patch.object(torch, "empty", filled):
            chosen = cuda_sm90.run_hidden(of_tokens, RouterProduct(weight, None, got), ROUTING, out)
        assert chosen is not None
        names = ("ids", "weights", "output", "logits")
        for name, a, b in zip(names, (*chosen, out, got), (*want, logits), strict=True):
            if not torch.equal(a, b):
                wrong.append(f"{name} of {tokens} tokens")
    print(
        f"{count} multiprocessors: "
        + (f"wrong: {', '.join(wrong)}" if wrong else "all results are those of two launches")
    )
    if count >= 8:
        print("a share of fewer multiprocessors than tokens was asked for")
    return bool(wrong) or count >= 8


if __name__ == "__main__":
    sys.exit(main())

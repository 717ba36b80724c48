"""Ids that change while launches read them, so that thread blocks disagree and some wait for what nobody sends.

Prints how long it took CUDA to end that. test_cuda_sm90_streams.py starts it: the process can do nothing more on the
GPU.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import torch_moe_ops as moe

EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 16, 8, 2048, 768, 2
COPIES, CALLS = 400, 40  # in graphs, as the host could not ask for them as fast
SECONDS = 40.0  # after which nothing has disagreed


def graph_of(stream: torch.cuda.Stream, turn: object, count: int) -> torch.cuda.CUDAGraph:
    assert callable(turn)
    turn(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for at in range(count):
            turn(at)
    return graph


def main() -> None:
    shapes = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    w13, w2 = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 32 for shape in shapes)
    w = moe.prepare(moe.quantize_experts(w13, w2, "nvfp4"), act_format="none")
    assert w.backend == "cuda_sm90", w.backend
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(TOKENS * TOP_K, device="cuda", dtype=torch.int32).view(TOKENS, TOP_K) % EXPERTS
    weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, device="cuda")
    # All experts are this rank's, or none: blocks that see the one or the other have other shares of the work.
    written = [ids.cpu().pin_memory(), torch.full_like(ids, -1, device="cpu").pin_memory()]
    writer, caller = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    copies = graph_of(writer, lambda at: ids.copy_(written[at % 2], non_blocking=True), COPIES)
    calls = graph_of(caller, lambda _: moe.fused_moe_routed(x, ids, weights, w), CALLS)
    torch.cuda.synchronize()
    start = time.monotonic()
    while time.monotonic() - start < SECONDS:
        begin = time.monotonic()
        try:
            for _ in range(4):
                with torch.cuda.stream(writer):
                    copies.replay()
                with torch.cuda.stream(caller):
                    calls.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            print(f"ended {time.monotonic() - begin:.1f} s after it was asked for: {first}", flush=True)
            sys.stderr.flush()
            os._exit(0)  # nothing of CUDA works any more, not even its end
    print("no launch's thread blocks disagreed", flush=True)
    os._exit(4)


if __name__ == "__main__":
    main()

"""Experts of a checkpoint over several ranks, compared with one process that has all of them.

    torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py [CHECKPOINT] [--layer N] [--tokens T]

On GPUs where there is one for each rank (NCCL), else on CPUs (gloo). Rank r gives T + r tokens; without torchrun one
rank does everything. Exit status 1: the result is further from one process than rounding explains.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import torch_moe_ops as moe

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
# Partial results of the ranks are added in float32; other kernels may run where a rank has fewer experts.
MAX_ERROR = {"cpu": 1e-6, "cuda": 6e-3}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one MoE layer over the ranks of torchrun.")
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=5, help="of rank 0; every other rank has one more")
    parser.add_argument("--top-k", type=int, default=2)
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    raw = moe.load_experts(args.checkpoint, layer=args.layer)
    most = args.tokens + ranks - 1
    ep = moe.ExpertParallel.from_raw(dist.group.WORLD, raw, most, device=device)
    if rank == 0:
        print(f"checkpoint  {args.checkpoint.name} layer {args.layer}, {raw.num_experts} experts")
        print(moe.explain(ep))

    generator = torch.Generator().manual_seed(rank)
    tokens = args.tokens + rank
    hidden_states = torch.randn(tokens, raw.hidden_size, generator=generator).to(device, torch.bfloat16)
    router_logits = torch.randn(tokens, raw.num_experts, generator=generator).to(device)
    routing = moe.Routing("renormalize", top_k=args.top_k)
    layer = torch.compile(ep.fused, fullgraph=True) if device.type == "cuda" else ep.fused
    out = layer(hidden_states, router_logits, routing=routing, out_dtype=torch.float32)

    whole = moe.prepare(raw, device=device)  # what expert parallelism is there to avoid
    want = moe.fused_moe(hidden_states, router_logits, whole, routing=routing, out_dtype=torch.float32)
    error = ((out - want).norm() / want.norm()).item()
    load = ep.total_load().tolist()
    for turn in range(ranks):
        if turn == rank:
            experts = ep.placement.slots[rank]
            print(
                f"rank {rank}      experts {experts[0]}-{experts[-1]}, {tokens} tokens, error {error:.1e} relative L2",
                flush=True,
            )
        dist.barrier()
    if rank == 0:
        print(f"load        {load}")
    dist.destroy_process_group()
    return 0 if error <= MAX_ERROR[device.type] else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

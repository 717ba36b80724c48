"""QLoRA on NVFP4 experts: they stay packed and frozen, PEFT adapters learn, and the result is exported as NVFP4.

    python examples/qlora_qwen3_moe.py [CHECKPOINT] [--steps 40] [--no-merge-aware]
    python examples/qlora_qwen3_moe.py --synthetic [--layers 4] [--tokens 4096] [--steps 10]

The task: each token has one that follows it. By default a small checkpoint of tests/data learns it on a CPU, seeing the
merged and quantized weights (merge-aware), so that the export computes what was trained. --synthetic makes a random
model instead, on a GPU with the layer sizes of Qwen3-30B-A3B, and prints time and memory. Needs peft.
Exit status 1: the loss did not fall, or the export is not what was trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import torch_moe_ops as moe
import torch_moe_ops.transformers as moeq_transformers
from torch_moe_ops.transformers.modules import find_experts

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# From process to process float32 products are added in another order.
SAME = 1e-6
FALLS_TO = {"checkpoint": 0.6, "synthetic": 0.99}  # of the first loss, at least


def load(folder: Path, device: torch.device) -> Any:
    moeq_transformers.register(act_format="none")
    # The fastest backends of GPUs take bfloat16 alone.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)


def random_model(layers: int, device: torch.device) -> Any:
    """Qwen3-MoE, experts in NVFP4: on a GPU in bfloat16 with the layers of Qwen3-30B-A3B, elsewhere with small ones."""
    large = device.type == "cuda"
    names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = dict(zip(names, (2048, 768, 128, 8) if large else (128, 64, 8, 2), strict=True))
    sizes |= dict(zip(heads, (32, 4, 128) if large else (4, 2, 32), strict=True))
    config = Qwen3MoeConfig(num_hidden_layers=layers, vocab_size=8192, norm_topk_prob=True, **sizes)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if large else torch.float32)
    moeq_transformers.quantize_model(model, "nvfp4")
    return model


def batch(followers: Tensor, sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Sequences in which every token is followed by its one: [sequences, length]."""
    tokens = [torch.randint(len(followers), (sequences,), generator=generator)]
    for _ in range(length - 1):
        tokens.append(followers[tokens[-1]])
    return torch.stack(tokens, 1)


def progress(steps: Iterable[int], total: int) -> Iterable[int]:
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, total=total, desc="training", disable=not sys.stderr.isatty())


def train(model: Any, args: argparse.Namespace, sequences: int, length: int) -> list[float]:
    """Steps on the adapters alone. Prints losses, time and memory."""
    device = next(model.parameters()).device
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=args.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    followers = torch.randperm(min(model.config.vocab_size, 96), generator=generator)
    losses, seconds = [], []
    model.train()
    for step in progress(range(args.steps), args.steps):
        ids = batch(followers, sequences, length, generator).to(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
        if step % max(1, args.steps // 4) == 0:
            print(f"step {step:<6} loss {losses[-1]:.3f}", flush=True)
    model.eval()
    steady = sorted(seconds)[len(seconds) // 2]
    print(f"loss        {losses[0]:.3f} to {losses[-1]:.3f} in {args.steps} steps of {sequences * length} tokens")
    print(f"time        {sum(seconds):.1f} s, {steady * 1e3:.1f} ms a step (median)")
    print(f"memory      {peak_gib(device):.2f} GiB at most")
    return losses


def peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def report(model: Any) -> None:
    prepared = [found.module.moeq_weights.prepared for found in find_experts(model.get_base_model())]
    packed = sum(t.numel() * t.element_size() for w in prepared for t in w.tensors().values())
    values = sum(w.num_experts * 3 * w.hidden_size * w.intermediate_size for w in prepared)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"experts     {len(prepared)} layers, {packed / 2**20:.1f} MiB packed, {values / 2**19:.1f} MiB in bfloat16")
    print(f"adapters    {learning} values; backend {prepared[0].backend}", flush=True)


def with_adapters(model: Any, rank: int, merge_aware: bool) -> Any:
    import peft

    moeq_transformers.prepare_for_peft(model, merge_aware=merge_aware)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=EXPERTS)
    return peft.get_peft_model(model, config)


@torch.no_grad()
def exported(model: Any, args: argparse.Namespace) -> int:
    """Merge, export, read the export: experts must be the same bits, and logits those that were trained."""
    device = next(model.parameters()).device
    ids = torch.arange(2 * 16).view(2, 16).to(device)
    trained = model(input_ids=ids, use_cache=False).logits
    merged = model.merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder)
        again = load(Path(folder), device)
    pairs = zip(find_experts(merged), find_experts(again), strict=True)
    same = all(restored(a).equal(restored(b)) for a, b in pairs)
    logits = again(input_ids=ids, use_cache=False).logits
    error = ((logits - trained).double().norm() / trained.double().norm()).item()
    allowed = SAME if args.merge_aware else float("inf")
    print(f"export      NVFP4, experts {'the same bits' if same else 'DIFFERENT'}; logits {error:.1e} from the trained")
    return int(not same or not error <= allowed)


def restored(found: Any) -> moe.RawWeights:
    return dataclasses.replace(moe.restore(found.module.moeq_weights.prepared), source="")  # wherever they are from


def main() -> int:
    parser = argparse.ArgumentParser(description="QLoRA on NVFP4 experts.")
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--synthetic", action="store_true", help="a random model, timed")
    parser.add_argument("--layers", type=int, default=4, help="with --synthetic")
    parser.add_argument("--tokens", type=int, default=4096, help="with --synthetic: in a step")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--merge-aware", action=argparse.BooleanOptionalAction)
    args = parser.parse_args()
    kind = "synthetic" if args.synthetic else "checkpoint"
    args.steps = args.steps or (10 if args.synthetic else 40)
    args.lr = args.lr or (5e-3 if args.synthetic else 2e-2)
    args.merge_aware = not args.synthetic if args.merge_aware is None else args.merge_aware
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    base = random_model(args.layers, device) if args.synthetic else load(args.checkpoint, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = with_adapters(base, args.rank, args.merge_aware)
    report(model)
    length = min(args.tokens, 2048) if args.synthetic else 16
    losses = train(model, args, args.tokens // length if args.synthetic else 16, length)
    failed = not losses[-1] <= FALLS_TO[kind] * losses[0]
    return int(failed) if args.synthetic else exported(model, args) or int(failed)


if __name__ == "__main__":
    sys.exit(main())

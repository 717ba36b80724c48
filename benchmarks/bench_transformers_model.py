#!/usr/bin/env python3
"""Time whole transformers models on random quantized experts: decode steps in a CUDA graph, prefill, memory.

    python benchmarks/bench_transformers_model.py --out benchmarks/results/h200_qwen3_30b_a3b.json
    python benchmarks/bench_transformers_model.py --shape gpt_oss_20b --out benchmarks/results/h200_gpt_oss_20b.json

A decode step is one token for each sequence of the batch, through a static cache of 1024 positions, mask given (as
`generate` does). "moe" is all MoE blocks of the model one after the other, "experts" their experts alone on ids that
are given, each in a graph of its own: a router costs what lies between. "profile" says what routers and experts take
within the decode step itself (see model_graphs.shares). `--own-router` leaves transformers' routers. `--turns` has
steps and those without MoE blocks in turns, in one process: what the blocks take within a step is what that is shorter
by. Steps of two processes differ by up to 6 % with the same kernels.

One shape takes about three minutes on an H200, two of them compiling: `--compile ""` leaves that out, and
`--batches "" --prefill 0` leaves out all the rest. Each line is written to `--out` when it is known. What Inductor has
compiled is taken from its cache by a later run (TORCHINDUCTOR_CACHE_DIR says where it is; "compile_s" is small then),
so that a run that was ended while it compiled gets further the next time. Runs with the same file for `--turn` take
turns at timing what they have compiled, so that several may compile beside each other. `--layers 4` has so few of the
layers, all else as it is: steps of two such models differ by the layers that one has more.

transformers 5.17 or later must be importable, with what it imports: huggingface_hub, safetensors, tokenizers, regex,
numpy, packaging, pyyaml, tqdm, filelock, typer. On a machine without a network, `scripts/carry_transformers.sh` puts
them into the folder .whl elsewhere; carry that and run with PYTHONPATH=.whl.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import result_lines
import torch
import transformers
from model_graphs import capture, profile, seconds, summary, timed
from transformers import StaticCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers_models import SHAPES, build

import torch_moe_ops as moe
from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.transformers.modules import find_experts

CACHE = 1024
POSITION = 100  # below the sliding window of gpt-oss: its static layers change their Python path when it is full


class Decode:
    """One decode step of a model through a static cache, as a function without arguments."""

    def __init__(self, model: Any, batch: int, cache_len: int) -> None:
        config, device = model.config, model.device
        self.model = model
        self.ids = torch.randint(0, config.vocab_size, (batch, 1), device=device)
        self.cache = StaticCache(config=config, max_cache_len=cache_len)
        prompt = torch.randint(0, config.vocab_size, (batch, POSITION), device=device)
        model(input_ids=prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.positions = torch.full((batch, 1), POSITION, device=device)
        self.mask = self._mask()
        self.saved = [(layer, layer.cumulative_length.clone()) for layer in self.cache.layers]

    def _mask(self) -> Any:
        config = self.model.config
        embeds = self.model.get_input_embeddings()(self.ids)
        said = {"attention_mask": None, "past_key_values": self.cache, "position_ids": self.positions}
        masks = {"full_attention": create_causal_mask(config=config, inputs_embeds=embeds, **said)}
        if getattr(config, "sliding_window", None) is None:
            return masks["full_attention"]
        masks["sliding_attention"] = create_sliding_window_causal_mask(config=config, inputs_embeds=embeds, **said)
        return masks

    def __call__(self) -> torch.Tensor:
        options = {"position_ids": self.positions, "past_key_values": self.cache, "use_cache": True}
        return self.model(input_ids=self.ids, attention_mask=self.mask, **options).logits

    def rewind(self) -> None:
        """Each step writes one position further: back to the first, so that none leaves the cache."""
        for layer, length in self.saved:
            layer.cumulative_length.copy_(length)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = POSITION


def nothing(number: int, hidden: torch.Tensor) -> None:
    """In front of a layer."""


def blocks_of(model: Any) -> list[Any]:
    """The MoE block of every layer."""
    return [model.get_submodule(found.name.rpartition(".")[0]) for found in find_experts(model)]


def through_blocks(model: Any, batch: int, before: Callable[[int, torch.Tensor], Any] = nothing) -> Callable[[], Any]:
    """All MoE blocks; `before` gets the number of each and its hidden states, and runs in front of it."""
    hidden = torch.randn(batch, 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    blocks = blocks_of(model)

    def run() -> Any:
        return [(before(i, hidden), block(hidden)) for i, block in enumerate(blocks)]

    return run


def through_experts(model: Any, batch: int, before: Callable[[int, torch.Tensor], Any] = nothing) -> Callable[[], Any]:
    """The experts on ids that were chosen before, of int32 as the ops take them; `before` as for through_blocks."""
    size = model.config.hidden_size
    hidden = torch.randn(batch, size, dtype=model.dtype, device=model.device)
    top_k = model.config.num_experts_per_tok
    layers = []
    for found in find_experts(model):
        w = found.module.moeq_weights.prepared
        ids = torch.rand(batch, w.num_experts, device=model.device).topk(top_k).indices.int()
        layers.append((w, ids, torch.full((batch, top_k), 1 / top_k, device=model.device)))

    def run() -> Any:
        return [
            (before(i, hidden[:, None]), fused_moe_routed(hidden, ids, weights, w))
            for i, (w, ids, weights) in enumerate(layers)
        ]

    return run


@contextlib.contextmanager
def without_blocks(model: Any) -> Iterator[None]:
    """MoE blocks give what they are given."""
    blocks = blocks_of(model)
    given = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    for block in blocks:
        more = result[1:] if isinstance(result := block(given), tuple) else None
        block.forward = lambda hidden, more=more: hidden if more is None else (hidden, *more)
    yield
    for block in blocks:
        del block.forward


def in_turns(model: Any, batch: int, step: Decode, args: argparse.Namespace, note: Callable[..., None]) -> None:
    """A step, and one without routers and experts, in turns."""
    ways = {"decode": contextlib.nullcontext, "decode without": without_blocks}
    replays = {}
    for what, way in ways.items():
        with way() if way is contextlib.nullcontext else way(model):
            step.rewind()
            replays[what] = capture(step, step.rewind)
    for turn in range(args.turns):
        for what, replay in replays.items():
            note(what=what, batch=batch, turn=turn, **timed(replay, args.rounds, step.rewind))
    layers = len(find_experts(model))
    note(what="profile", batch=batch, **profile_or_reason(replays["decode"], layers, step.rewind))


def measure(model: Any, args: argparse.Namespace, note: Callable[..., None]) -> None:
    """Notes each line of the result when it is known."""
    begin = time.perf_counter()
    layers = len(find_experts(model))
    decodes = {batch: Decode(model, batch, args.cache) for batch in _numbers(args.batches)}
    for batch, step in decodes.items():
        if args.turns:
            in_turns(model, batch, step, args, note)
            continue
        replay = capture(step, step.rewind)
        note(what="decode", batch=batch, **timed(replay, args.rounds, step.rewind))
        note(what="moe", batch=batch, **timed(capture(through_blocks(model, batch)), args.rounds))
        note(what="experts", batch=batch, **timed(capture(through_experts(model, batch)), args.rounds))
        note(what="profile", batch=batch, **profile_or_reason(replay, layers, step.rewind))
    if args.prefill:
        ids = torch.randint(0, model.config.vocab_size, (1, args.prefill), device=model.device)
        prefill = lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)  # noqa: E731
        prefill()
        note(what="prefill", tokens=args.prefill, **summary([seconds(prefill) * 1e3 for _ in range(5)]))
    for batch in _numbers(args.compile):
        if time.perf_counter() - begin > args.budget:
            note(what="decode compiled", batch=batch, left_out=f"{args.budget} s are over")
            continue
        step = decodes.get(batch) or Decode(model, batch, args.cache)
        torch._dynamo.reset()
        compiled = torch.compile(step.__call__, fullgraph=True, dynamic=False)
        step.rewind()
        compiling = round(seconds(compiled), 1)
        with turn(args.turn):
            replay = capture(compiled, step.rewind)
            times = timed(replay, args.rounds, step.rewind)
            note(what="decode compiled", batch=batch, compile_s=compiling, compiled=_phases(), **times)
            note(what="profile compiled", batch=batch, **profile_or_reason(replay, layers, step.rewind))


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Alone among the processes that name this file; None: at once."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield


def _phases() -> dict[str, float]:
    """Seconds that compilation took, as Dynamo adds them up; a phase counts those within it too."""
    names = {"entire_frame_compile": "all", "backend_compile": "backend", "inductor_compile": "inductor"}
    spent = torch._dynamo.utils.calculate_time_spent()
    return {names[phase]: round(seconds, 1) for phase, seconds in spent.items() if phase in names}


def profile_or_reason(replay: Callable[[], Any], layers: int, rewind: Callable[[], None]) -> dict[str, Any]:
    """A profile's figures, or why there are none: what was timed before it is to be kept."""
    try:
        return profile(replay, layers, rewind)
    except (ValueError, RuntimeError) as error:
        return {"left_out": str(error)}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_30b_a3b")
    parser.add_argument("--scheme", choices=("nvfp4", "mxfp4"), help="default: nvfp4, of gpt_oss_20b mxfp4")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--compile", default="1,8", help="batch sizes of which the step is compiled too")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens; 0: none")
    parser.add_argument("--cache", type=int, default=CACHE)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=110, help="seconds after which nothing more is compiled")
    parser.add_argument("--turn", type=Path, help="a file that runs share which time one after the other")
    parser.add_argument("--own-router", action="store_true", help="leave transformers' routers as they are")
    parser.add_argument("--turns", type=int, default=0, help="steps, and those without blocks, in turns; no more")
    parser.add_argument("--layers", type=int, help="how many, where not as many as the architecture has")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs; also on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("a GPU is needed, or --tiny")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    begin = time.perf_counter()
    sizes = {"tiny": args.tiny, "layers": args.layers}
    model = build(args.shape, device, scheme=args.scheme, route=not args.own_router, **sizes)
    holders = [found.module.moeq_weights for found in find_experts(model)]
    weights = {holder.prepared.backend for holder in holders}
    result: dict[str, Any] = {
        "shape": args.shape,
        "layers": model.config.num_hidden_layers,
        "argv": result_lines.arguments(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "library": moe.__version__},
        "backends": sorted(weights),
        "routers": "transformers" if args.own_router else "moeq::route_hidden",
        "build_s": round(time.perf_counter() - begin, 1),
        "model_gib": round(model.get_memory_footprint() / 2**30, 3),
        "parameters": model.num_parameters(),
    }
    if device.type == "cuda":
        result["allocated_gib"] = round(torch.cuda.memory_allocated() / 2**30, 3)
    print(json.dumps(result), flush=True)
    lines: list[dict[str, Any]] = []
    result["lines"] = lines

    def note(**line: Any) -> None:
        """Written at once, so that a run that is ended keeps what it knew."""
        lines.append(line | {"at_s": round(time.perf_counter() - begin, 1)})
        print(json.dumps(lines[-1]), flush=True)
        if device.type == "cuda":
            result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    measure(model, args, note)


if __name__ == "__main__":
    with torch.no_grad():
        main()

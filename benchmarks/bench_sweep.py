#!/usr/bin/env python3
"""Sweep models, formats and numbers of tokens: `auto` beside every other backend that fits, and other libraries.

    bash benchmarks/peers/fetch_peers.sh                                      # other libraries; without them alone
    python benchmarks/bench_sweep.py --seconds 120                            # as much as fits; again for more
    CUDA_VISIBLE_DEVICES=1 python benchmarks/bench_sweep.py --share 1/2 ...   # a second GPU, beside --share 0/2
    python benchmarks/bench_sweep.py --read                                   # the report alone

Six layers (Qwen3-30B, DeepSeek-V3, gpt-oss-120b, Mixtral, Kimi-K2, GLM-4.6), 1 to 16384 tokens, the most wanted cells
first. Lines are appended to --out, and what it (or a file of --done) has is not timed again. Medians of CUDA graph
replays over rotating routings, the layers taking turns (peers/README.md has the protocol). The report names each
cell in which `auto` takes over 3 % more than another one, and where it dips (sweep_findings.py).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))  # read when CUDA starts: room for kernels shipped as PTX

import bench_peers  # noqa: E402
import result_lines  # noqa: E402
import sweep_cells  # noqa: E402
import sweep_findings  # noqa: E402
import sweep_layers  # noqa: E402
import torch  # noqa: E402
from moe_peers import common, runner  # noqa: E402

RESULTS = _HERE / "results" / "h200_auto_sweep.jsonl"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default=",".join(sweep_cells.MODELS))
    p.add_argument("--fmts", default=",".join(sweep_cells.FORMATS))
    p.add_argument("--ms", default=",".join(map(str, sweep_cells.TOKENS)))
    p.add_argument("--peers", default="humming,marlin,triton_kernels,vllm_triton,deepgemm", help="'' for none")
    p.add_argument("--peers-dir", type=Path, default=Path(os.environ.get("MOE_PEERS_DIR", ".peers")))
    p.add_argument("--humming-gemm", choices=("both", "indexed", "grouped"), default="both")
    p.add_argument("--seconds", type=float, default=120, help="nothing is begun after that")
    p.add_argument("--share", default="0/1", metavar="I/N", help="the I-th of N processes, a GPU each")
    p.add_argument("--reps", type=int, default=9)
    p.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1), help="that compile at once")
    p.add_argument("--compile-seconds", type=float, default=45, help="for the first calls of a piece, at most")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--done", type=Path, action="append", default=[], help="cells of this file are done, too")
    p.add_argument("--list", action="store_true", help="print what is left, and stop (no GPU)")
    p.add_argument("--read", action="store_true", help="print the report of --out, and stop (no GPU)")
    return p


def left_of(args: argparse.Namespace) -> list[sweep_cells.Piece]:
    done = {cell for path in (args.out, *args.done) for cell in sweep_cells.cells_done(sweep_cells.read(path))}
    chosen = (args.models.split(","), args.fmts.split(","), map(int, args.ms.split(",")))
    return sweep_cells.share(sweep_cells.pieces(done, *chosen), args.share)


def run_piece(piece: sweep_cells.Piece, args: argparse.Namespace, context: Any, sink: common.Sink, ends: float) -> bool:
    """Load, compile, and time one number of tokens after the other. Returns whether the device lives."""
    shape, begin = common.SHAPES[piece.model], time.monotonic()
    peers = sweep_layers.peers_of(piece.fmt, args.peers.split(",")) if (args.peers_dir / "MANIFEST").exists() else ""
    entries = sweep_layers.our_entries(piece.fmt, sink) + runner.peer_entries(peers, bench_peers.registry())
    layers = runner.build_layers(shape, entries, context, sink)
    built = time.monotonic() - begin
    compiled = sweep_layers.first_calls(layers, shape, piece.ms, args.threads, args.compile_seconds)
    sink.emit(event="piece", shape=piece.model, fmt=piece.fmt, build_s=round(built, 1), compile_s=round(compiled, 1))
    for m in piece.ms:
        if time.monotonic() > ends:
            break
        try:
            runner.time_one(shape, "uniform", common.uniform, m, layers, context, sink, args.reps, 0)
        except RuntimeError as error:  # a kernel that fails is reported by a later call
            sink.emit(event="error", shape=piece.model, fmt=piece.fmt, M=m, where="run", err=repr(error)[:400])
        if not runner.device_alive():
            sink.emit(event="fatal", why="the device reports an error: nothing more can run in this process")
            return False
    layers.clear()
    runner.free()
    return True


def main() -> int:
    args = parser().parse_args()
    if args.read:
        print(sweep_findings.report(sweep_cells.read(args.out)))
        return 0
    pieces = left_of(args)
    if args.list:
        print(*(f"{p.model} {p.fmt} {','.join(map(str, p.ms))}" for p in pieces), sep="\n")
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --list and --read work without one")
    ends = time.monotonic() + args.seconds
    sys.path.insert(0, str(args.peers_dir.resolve()))
    context = runner.Context(args.peers_dir.resolve(), options={"humming": args.humming_gemm})
    sink, alive = common.Sink(args.out), True
    sink.emit(**result_lines.environment(), date=datetime.date.today().isoformat())
    with torch.inference_mode():
        for piece in pieces:
            if time.monotonic() > ends or not alive:
                break
            alive = run_piece(piece, args, context, sink, ends)
    print(sweep_findings.report(sink.records), flush=True)
    return 0 if alive else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""One of several ranks that exchange over "p2p", of which the last stops coming: the others must end, and say for whom.

    python tests/programs/ep_stopped.py RANK SIZE STORE PHASE TOKENS

PHASE: "dispatch", where the last rank does not call, or "combine", where it calls the dispatch alone. TOKENS: of each
rank. The others print "ended: ..." with CUDA's error and how long it took.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "support")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from problems import Case, make_batch, make_raw  # noqa: E402

import torch_moe_ops as moe  # noqa: E402

LIMIT = 25  # seconds


def main(rank: int, size: int, store: str, phase: str, tokens: int) -> None:
    torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=LIMIT)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit, device_id=device
    )
    case = Case(scheme="none", hidden=256, inter=128, tokens=tokens)
    with torch.inference_mode():
        ep = moe.ExpertParallel.from_raw(dist.group.WORLD, make_raw(case, "cuda"), tokens, "p2p")
        batch = make_batch(case, "cuda")
        ep(*batch)
        torch.cuda.synchronize()
        if rank < size - 1:
            start = time.perf_counter()
            try:
                ep(*batch)
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"ended: after {time.perf_counter() - start:.1f} s: {error}", flush=True)
            ctypes.CDLL(None).fflush(None)  # what the kernel has printed
            os._exit(0)  # nothing else can be done on this GPU
        if phase == "combine":
            x, ids, weights = batch
            torch.ops.moeq.ep_dispatch(x, None, ids, weights, "p2p", dist.group.WORLD.group_name, size, tokens)
        time.sleep(3 * LIMIT)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))

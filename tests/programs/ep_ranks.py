"""One rank of a group of processes that run cases of expert parallelism, one after the other.

    python tests/programs/ep_ranks.py RANK SIZE STORE OUT TRANSPORT CASE ...

STORE is a file that the ranks meet at; what became of each case is written to OUT as JSON: "passed", or the traceback.
TRANSPORT "cpu" is gloo on CPUs; "nccl" and "p2p" are between GPUs, one of each rank.
A rank stops at the first case that fails, and the others run into the time limit of the group.
"""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import torch.distributed as dist
from ep_adapters import ADAPTERS, DIVIDED
from ep_cases import CASES, World
from ep_errors import ERRORS
from ep_partial_rows import PARTIAL_ROWS, PARTIAL_ROWS_DIVIDED

EVERY = CASES | ERRORS | ADAPTERS | DIVIDED | PARTIAL_ROWS | PARTIAL_ROWS_DIVIDED
SECONDS = 120  # that a collective waits for the others: compiling takes a while


def world_of(rank: int, size: int, store: str, transport: str) -> World:
    limit = datetime.timedelta(seconds=SECONDS)
    meeting = {"init_method": f"file://{store}", "rank": rank, "world_size": size, "timeout": limit}
    if transport == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **meeting)
        return World(rank, size)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **meeting)
    return World(rank, size, "cuda", transport)


def main(rank: int, size: int, store: str, out: str, transport: str, names: list[str]) -> int:
    world = world_of(rank, size, store, transport)
    outcomes = dict.fromkeys(names, "not run")
    for name in names:
        torch.manual_seed(0)
        try:
            EVERY[name](world)
            outcomes[name] = "passed"
        except BaseException:
            outcomes[name] = traceback.format_exc()
            break
        finally:
            Path(out).write_text(json.dumps(outcomes))
    done = all(outcome == "passed" for outcome in outcomes.values())
    if done:
        dist.destroy_process_group()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *sys.argv[4:6], sys.argv[6:]))

"""One rank of two of data parallelism in vLLM's LLM.generate on a CPU, over gloo; a process of its own for tests.

    python tests/programs/vllm_data_parallel.py FOLDER EXPERT_PARALLEL PORT RANK

EXPERT_PARALLEL: 1: whole experts are on one rank or the other; 0: each rank has a part of every expert. Prints "RESULT "
and {"prompts", "tokens"} or {"error"} in the end.

vLLM 0.32 has no gathering of unequal parts, nor its opposite, among CPUs, which is why no MoE model runs there with data
parallelism. This program adds the two; everything else is vLLM's.
"""

import json
import os
import sys
from typing import Any

import torch
from vllm_generate import OPTIONS, greedy, prepare_vllm, prompts_of

RANKS = 2


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks; sizes: how many each has."""
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    assert dim == 0
    counts = [input_.shape[0]] * self.world_size if sizes is None else sizes
    parts = [input_.new_empty(count, *input_.shape[1:]) for count in counts]
    for rank, part in enumerate(parts):
        if rank == self.rank_in_group:
            part.copy_(input_)
        torch.distributed.broadcast(part, self.ranks[rank], group=self.device_group)
    return torch.cat(parts)


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum over the ranks; sizes: how many each gets."""
    assert dim == 0
    total = input_.float()
    torch.distributed.all_reduce(total, group=self.device_group)
    counts = [input_.shape[0] // self.world_size] * self.world_size if sizes is None else sizes
    return total.split(counts)[self.rank_in_group].to(input_.dtype)


def add_collectives() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for function in (all_gatherv, reduce_scatterv):
        assert function.__name__ not in vars(CpuCommunicator), f"vLLM has its own {function.__name__} now"
        setattr(CpuCommunicator, function.__name__, function)


def generate(folder: str, expert_parallel: bool, rank: int) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(folder, enforce_eager=True, enable_expert_parallel=expert_parallel, **OPTIONS)
    mine = prompts_of(folder)[rank::RANKS]
    return {"prompts": mine, "tokens": greedy(llm, mine, [])}


def main() -> None:
    folder, expert_parallel, port, rank = sys.argv[1:]
    os.environ |= {
        "VLLM_DP_RANK": rank,
        "VLLM_DP_RANK_LOCAL": rank,
        "VLLM_DP_SIZE": str(RANKS),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": port,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    try:
        result = generate(folder, expert_parallel == "1", int(rank))
    except Exception as error:  # told to the test, which decides
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(result), flush=True)


# Also where vLLM's worker processes import this file.
prepare_vllm()
add_collectives()

if __name__ == "__main__":
    main()

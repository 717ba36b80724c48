"""One rank of two of data parallelism in vLLM's LLM.generate on a CPU, over gloo; a process of its own for tests.

    python tests/programs/vllm_data_parallel.py FOLDER EXPERT_PARALLEL PORT RANK

EXPERT_PARALLEL: 1: whole experts are on one rank or the other; 0: each rank has a part of every expert. Prints "RESULT "
and {"prompts", "tokens"} or {"error"} in the end.
"""

import json
import os
import sys
from typing import Any

from vllm_generate import OPTIONS, greedy, prepare_vllm, prompts_of

RANKS = 2


def generate(folder: str, expert_parallel: bool, rank: int) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(folder, enforce_eager=True, enable_expert_parallel=expert_parallel, **OPTIONS)
    mine = prompts_of(folder)[rank::RANKS]
    return {"prompts": mine, "tokens": greedy(llm, mine)}


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
    prepare_vllm()
    try:
        result = generate(folder, expert_parallel == "1", int(rank))
    except Exception as error:  # told to the test, which decides
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""Runs checkpoints through vLLM's LLM.generate and prints greedy tokens as JSON; a process of its own for tests.

    python tests/programs/vllm_generate.py < JOBS

JOBS: a line a job, {"path": folder, "eager": bool}, with adapters {"adapters": [folders]} besides, of up to 8 ranks:
prompts take turns with the model alone and each of them. Prints a line for each: "RESULT " and the job with "prompts" and
"tokens", or with "error"; what comes before it is what was logged for it. The plug-in is the installed one's entry point,
or where there is none, called here.
"""

import gc
import json
import os
import sys
import warnings
from importlib.metadata import entry_points
from typing import Any

PROMPT_LENGTH, NEW_TOKENS, PROMPTS = 6, 12, 4
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "disable_log_stats": True,
}


def prompts_of(folder: str) -> list[list[int]]:
    with open(os.path.join(folder, "config.json")) as file:
        vocabulary = json.load(file)["vocab_size"]
    return [[(7 * i + 5 * j * j + 3) % vocabulary for j in range(PROMPT_LENGTH)] for i in range(PROMPTS)]


def greedy(llm: Any, prompts: list[list[int]], adapters: list[str]) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    owners = [None, *(LoRARequest(path, i + 1, path) for i, path in enumerate(adapters))]

    given = [{"prompt_token_ids": ids} for ids in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    requests = [owners[i % len(owners)] for i in range(len(prompts))]
    found = llm.generate(given, sampling, use_tqdm=False, lora_request=requests)
    return [list(o.outputs[0].token_ids) for o in found]


def generate(folder: str, eager: bool, adapters: list[str]) -> list[list[int]]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 8} if adapters else {}
    llm = LLM(folder, enforce_eager=eager, **OPTIONS, **lora)
    tokens = greedy(llm, prompts_of(folder), adapters)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return tokens


def prepare_vllm() -> None:
    """Its environment, and the plug-in where it is not installed."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    warnings.simplefilter("ignore")
    if not any(point.value.startswith("torch_moe_ops.") for point in entry_points(group="vllm.general_plugins")):
        from torch_moe_ops.vllm import register

        register()


def main() -> None:
    prepare_vllm()
    from torch_moe_ops.vllm import log

    for line in sys.stdin:
        job = json.loads(line)
        log._said.clear()  # each job is told who runs its experts
        try:
            tokens = generate(job["path"], job["eager"], job.get("adapters", []))
            result = {"prompts": prompts_of(job["path"]), "tokens": tokens}
        except Exception as error:  # told to the test, which decides
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps({**job, **result}), flush=True)


if __name__ == "__main__":
    main()

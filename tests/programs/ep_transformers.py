"""One rank of a transformers model whose experts are spread by ep_implementation="moeq": its results, as a file.

    python tests/programs/ep_transformers.py RANK SIZE STORE KIND OUT

KIND: "shared", where all ranks have one batch; "apart", where each has one of its own, of another size; "mixed", where
pairs of ranks share one. Each rank computes with all experts too, and writes how far the logits are apart.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism

import torch_moe_ops.transformers as moeq_transformers
from torch_moe_ops.transformers.expert_parallel import MoeqEP

SIZES = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8, "vocab_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8}
TOKENS = (7, 4)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts_per_tok=3, **SIZES)).eval()


def meshes(kind: str, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Of experts and of one batch."""
    everybody = init_device_mesh("cpu", (size,))
    if kind == "shared":
        return everybody, everybody
    return everybody, init_device_mesh(
        "cpu", (size // 2, 2) if kind == "mixed" else (size, 1), mesh_dim_names=("dp", "tp")
    )["tp"]


def batch_of(kind: str, rank: int) -> Tensor:
    number = {"shared": 0, "apart": rank, "mixed": rank // 2}[kind]
    g = torch.Generator().manual_seed(3 + number)
    return torch.randint(0, SIZES["vocab_size"], (1, TOKENS[number % 2]), generator=g)


def main(rank: int, size: int, store: str, kind: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    moeq_transformers.register()
    whole, model = model_of(), model_of()
    ep_mesh, tp_mesh = meshes(kind, size)
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, ep_mesh, tp_mesh, plan, ep_implementation="moeq")
    calls: list[str] = []
    for name in ("_exchanged", "_of_shared_batch"):
        count(name, calls)
    batch, found = batch_of(kind, rank), {}
    with torch.no_grad():
        for tokens in (batch, batch[:, :1], batch[:, :0] if kind == "apart" and rank == size - 1 else batch):
            if tokens.numel():
                found[tokens.shape[1]] = float((model(tokens).logits - whole(tokens).logits).abs().max())
            else:  # a rank without tokens takes part
                for layer in model.model.layers:
                    layer.mlp(torch.zeros(1, 0, SIZES["hidden_size"]))
    inference = len(calls)
    loss = model(batch).logits.square().mean()  # with gradients: transformers' own way
    loss.backward()
    want = whole(batch).logits.square().mean()
    found["loss"] = float((loss - want).detach().abs())
    local = next(p for name, p in model.named_parameters() if name.endswith("down_proj"))
    torch.save({"apart": found, "calls": calls, "inference": inference, "experts": local.to_local().shape[0]}, out)
    dist.destroy_process_group()


def count(name: str, calls: list[str]) -> None:
    method = getattr(MoeqEP, name)

    def counted(self: MoeqEP, *args: Tensor) -> Tensor:
        calls.append(name)
        return method(self, *args)

    setattr(MoeqEP, name, counted)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

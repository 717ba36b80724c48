"""What vLLM's greedy tokens are held to: transformers in float32 on dequantized experts."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import torch_moe_ops as moe

# Two logits move in opposite directions at worst, and vLLM rounds in other places than transformers.
TIE = 3.0


def reference_model(folder: Path) -> torch.nn.Module:
    """The checkpoint's model with dequantized experts, float32. Its other weights must be unquantized."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    plain = AutoConfig.for_model(**config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32, attn_implementation="eager").eval()
    stored = load_file(folder / "model.safetensors")
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = []
    for name, parameter in own.items():
        if ".experts." in name:
            continue
        # transformers says mlp where Mixtral's files say block_sparse_moe.
        value = stored.get(name, stored.get(name.replace(".mlp.", ".block_sparse_moe.")))
        if value is None:
            missing += [name] if isinstance(parameter, torch.nn.Parameter) else []
        else:
            parameter.data.copy_(value)
    assert not missing, f"weights that the file must have: {missing}"
    for number, layer in enumerate(model.model.layers):
        _load_experts(layer.mlp.experts, folder, number)
    return model


def plain_model(folder: Path) -> torch.nn.Module:
    """A checkpoint that is not quantized, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _load_experts(experts: torch.nn.Module, folder: Path, number: int) -> None:
    raw = moe.load_experts(folder, layer=number)
    w13, w2 = moe.dequantize_experts(raw)
    transposed, interleaved = experts.is_transposed, not experts.is_concatenated

    def rows(w: Tensor) -> Tensor:
        return torch.stack(w.chunk(2, 1), 2).flatten(1, 2) if interleaved else w

    experts.gate_up_proj.data.copy_(rows(w13).transpose(1, 2) if transposed else rows(w13))
    experts.down_proj.data.copy_(w2.transpose(1, 2) if transposed else w2)
    if raw.w13_bias is not None and raw.w2_bias is not None:
        experts.gate_up_proj_bias.data.copy_(rows(raw.w13_bias))
        experts.down_proj_bias.data.copy_(raw.w2_bias)


@torch.no_grad()
def disagreements(model: torch.nn.Module, prompts: list[list[int]], tokens: list[list[int]]) -> tuple[int, list[str]]:
    """Number of tokens that are the model's own choice, and those others that no tie explains.

    The model gets vLLM's own tokens as context, so that one tie does not spoil what follows it. A tie: two logits that
    are closer than TIE times the most that bfloat16, in which vLLM runs, changes in a logit of this model.
    """
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    margins, noise = [], 0.0
    for prompt, chosen in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + chosen])
        logits, other = (m(ids).logits[0, len(prompt) - 1 : -1].float() for m in (model, rounded))
        noise = max(noise, (other - logits).abs().max().item())
        margins += (logits.max(1).values - logits[torch.arange(len(chosen)), chosen]).tolist()
    wrong = [f"token {i}: {m:.3g} below the best (bfloat16: {noise:.3g})" for i, m in enumerate(margins)]
    return margins.count(0.0), [text for text, m in zip(wrong, margins, strict=True) if m > TIE * noise]

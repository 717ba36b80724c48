"""Unquantized experts, saved by transformers: per expert, fused and transposed (gpt-oss, Llama4), stacked (DBRX)."""

from __future__ import annotations

import pytest
import torch
from checkpoints_support import write

from torch_moe_ops.checkpoints import CheckpointError, load_experts
from torch_moe_ops.commands.inspect import Inspection

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


def model(kind: str, dtype: torch.dtype):
    makers = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **COMMON, intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **COMMON, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **COMMON,
            intermediate_size=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=16,
        ),
        "llama4": lambda: transformers.Llama4TextConfig(
            **COMMON,
            intermediate_size=24,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
        ),
        "dbrx": lambda: transformers.DbrxConfig(
            d_model=32,
            n_heads=2,
            n_layers=2,
            vocab_size=64,
            attn_config={"kv_n_heads": 1, "rope_theta": 10000.0},
            ffn_config={"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
            pad_token_id=0,
        ),
    }
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(makers[kind]()).to(dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.normal_()
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_per_expert(tmp_path, dtype):
    made = model("qwen3_moe", dtype)
    made.save_pretrained(tmp_path)
    for raw, layer in zip(load_experts(tmp_path, None), made.model.layers, strict=True):
        assert (raw.scheme, raw.activation) == ("none", "silu")
        assert torch.equal(raw.w13, layer.mlp.experts.gate_up_proj) and raw.w13.dtype == dtype
        assert torch.equal(raw.w2, layer.mlp.experts.down_proj)


def test_shards_give_the_same(tmp_path):
    made = model("mixtral", torch.bfloat16)
    made.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    made.save_pretrained(tmp_path / "one")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    for layer in (0, 1):
        raw = load_experts(tmp_path / "shards", layer)
        one = load_experts(tmp_path / "one" / "model.safetensors", layer)
        assert torch.equal(raw.w13, one.w13) and torch.equal(raw.w2, one.w2)
        experts = made.model.layers[layer].mlp.experts
        assert torch.equal(raw.w13, experts.gate_up_proj) and torch.equal(raw.w2, experts.down_proj)


def test_gpt_oss_rows_are_interleaved(tmp_path):
    made = model("gpt_oss", torch.bfloat16)
    made.save_pretrained(tmp_path)
    raw, experts = load_experts(tmp_path, 1), made.model.layers[1].mlp.experts
    # transformers multiplies from the left and takes every second column as gate.
    assert torch.equal(raw.w13[:, :24], experts.gate_up_proj[..., 0::2].mT)
    assert torch.equal(raw.w13[:, 24:], experts.gate_up_proj[..., 1::2].mT)
    assert torch.equal(raw.w13_bias[:, :24], experts.gate_up_proj_bias[:, 0::2])
    assert torch.equal(raw.w13_bias[:, 24:], experts.gate_up_proj_bias[:, 1::2])
    assert torch.equal(raw.w2, experts.down_proj.mT) and torch.equal(raw.w2_bias, experts.down_proj_bias)
    assert raw.activation == "swigluoai"


def test_llama4_rows_are_concatenated(tmp_path):
    made = model("llama4", torch.bfloat16)
    made.save_pretrained(tmp_path)
    raw, experts = load_experts(tmp_path, 0), made.model.layers[0].feed_forward.experts
    assert torch.equal(raw.w13, experts.gate_up_proj.mT) and torch.equal(raw.w2, experts.down_proj.mT)
    assert raw.activation == "silu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard", ["20KB", "1MB"])
def test_dbrx_has_the_rows_of_all_experts_below_each_other(tmp_path, dtype, shard):
    made = model("dbrx", dtype)
    made.save_pretrained(tmp_path, max_shard_size=shard)
    for raw, block in zip(load_experts(tmp_path, None), made.transformer.blocks, strict=True):
        mlp = block.ffn.experts.mlp
        gate, up = raw.w13.chunk(2, dim=1)
        assert raw.w13.shape == (4, 48, 32) and raw.w2.shape == (4, 32, 24) and raw.activation == "silu"
        for ours, theirs in ((gate, mlp.w1), (up, mlp.v1), (raw.w2.mT, mlp.w2)):
            assert torch.equal(ours, theirs.unflatten(0, (4, 24))) and ours.dtype == dtype
    inspection = Inspection(tmp_path, quick=True, backends=False)
    assert any("unquantized" in line for line in inspection.lines()) and inspection.problems == 0


DBRX = "transformer.blocks.0.ffn.experts.mlp"


@pytest.mark.parametrize(
    ("sizes", "ffn", "reason"),
    [
        (
            (96, 96, 96),
            None,
            r"config.json must say moe_num_experts, got none: tensor .*experts.mlp.v1 has the rows of",
        ),
        ((96, 96, 96), {"moe_num_experts": 5}, r"experts.mlp.v1 must have two dimensions, and rows of 5 experts, got"),
        (
            (96, 48, 96),
            {"moe_num_experts": 4},
            r"experts.mlp.w1 must have shape .*96, 32.* like .*mlp.v1, and rows of 4",
        ),
        ((0, 0, 0), {"moe_num_experts": 4}, r"must have dimensions \[experts, rows, columns\]"),
        ((96, 96), {"moe_num_experts": 4}, r"all experts: down is missing"),
        ((96, 96, 96), {"moe_num_experts": -4}, r"moe_num_experts must be null or an integer, zero or greater, got -4"),
    ],
)
def test_dbrx_that_cannot_be_divided_is_refused(tmp_path, sizes, ffn, reason):
    tensors = {f"{DBRX}.{name}": torch.ones(rows, 32) for name, rows in zip(("v1", "w1", "w2"), sizes, strict=False)}
    write(tmp_path, tensors, ffn and {"model_type": "dbrx", "ffn_config": ffn})
    with pytest.raises(CheckpointError, match=reason):
        load_experts(tmp_path, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_orientation_comes_from_the_shapes(tmp_path, transposed):
    generator = torch.Generator().manual_seed(2)
    w13, w2 = torch.randn(3, 40, 16, generator=generator), torch.randn(3, 16, 20, generator=generator)
    root = "model.layers.7.mlp.experts"
    turn = (lambda t: t.mT) if transposed else (lambda t: t)
    raw = load_experts(write(tmp_path, {f"{root}.gate_up_proj": turn(w13), f"{root}.down_proj": turn(w2)}), 7)
    assert torch.equal(raw.w13, w13) and torch.equal(raw.w2, w2)
    assert raw.activation is None

"""PEFT's LoRA on packed experts: against the unquantized model that PEFT adapts itself, and through its own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")
peft = pytest.importorskip("peft", minversion="0.17", reason="needs peft >= 0.17, for target_parameters")

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402
from torch_moe_ops.transformers.peft import prepare_for_peft  # noqa: E402

QWEN, GPT_OSS, NEMOTRON = "qwen3_moe_modelopt_nvfp4", "gpt_oss_modelopt_nvfp4", "nemotron_h_modelopt_nvfp4"
TARGETS = {
    QWEN: ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    GPT_OSS: ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    NEMOTRON: ("mixer.experts.up_proj", "mixer.experts.down_proj"),
}
IDS = torch.arange(3, 35).view(2, 16)


def packed(name: str = QWEN, dtype: torch.dtype = torch.float32) -> Any:
    moeq_transformers.register(act_format="none")
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=dtype)


def config(name: str = QWEN, rank: int = 4) -> Any:
    return peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=[],
        target_parameters=list(TARGETS[name]),
        init_lora_weights=False,  # B is not zero
    )


def adapted(name: str = QWEN) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(prepare_for_peft(packed(name)), config(name))


def dequantized(name: str) -> Any:
    """The same model with its experts as ordinary parameters."""
    theirs = transformers.AutoConfig.from_pretrained(CHECKPOINTS / name)
    for scope in (theirs, theirs.get_text_config()):
        scope.__dict__.pop("quantization_config", None)
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    ours = packed(name)
    missing, _ = model.load_state_dict(ours.state_dict(), strict=False)
    for plain, found in zip(find_experts(model), find_experts(ours), strict=True):
        w13, w2 = moe.dequantize_experts(moe.restore(found.module.moeq_weights.prepared))
        own = plain.module
        if own.has_gate and not own.is_concatenated:
            w13 = torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)
        for parameter, values in (
            (getattr(own, "gate_up_proj" if own.has_gate else "up_proj"), w13),
            (own.down_proj, w2),
        ):
            parameter.data.copy_(values.mT if own.is_transposed else values)
        if own.has_bias:
            raw = moe.restore(found.module.moeq_weights.prepared)
            own.gate_up_proj_bias.data.copy_(torch.stack(raw.w13_bias.chunk(2, 1), 2).flatten(1))
            own.down_proj_bias.data.copy_(raw.w2_bias)
    assert all("experts" in name for name in missing), missing
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def loss_of(model: Any) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def factors(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", [QWEN, GPT_OSS, NEMOTRON])
def test_as_peft_adapts_the_dequantized_model(name: str) -> None:
    """Logits, and the gradient of every factor: transposed, interleaved and ungated experts too."""
    ours, theirs = adapted(name), dequantized(name)
    before = logits(ours.get_base_model())
    theirs.set_experts_implementation("eager")
    theirs = peft.get_peft_model(theirs, config(name))
    theirs.load_state_dict(factors(ours), strict=False)
    assert factors(ours).keys() == factors(theirs).keys()
    assert relative_l2(logits(ours), logits(theirs)) <= 1e-5
    with ours.disable_adapter():
        assert relative_l2(logits(ours), logits(theirs)) > 1e-2
    for model in (ours, theirs):
        loss_of(model).backward()
    for key, parameter in factors(ours).items():
        assert relative_l2(parameter.grad, factors(theirs)[key].grad) <= 1e-4, key
    assert before.shape == logits(ours).shape


def test_what_learns_and_what_is_saved() -> None:
    model = packed()
    before = (
        model.state_dict().keys(),
        [n for n, _ in model.named_parameters()],
        str(type(model.model.layers[0].mlp.experts)),
    )
    prepare_for_peft(model)
    prepare_for_peft(model)
    after = (
        model.state_dict().keys(),
        [n for n, _ in model.named_parameters()],
        str(type(model.model.layers[0].mlp.experts)),
    )
    assert before == after
    model = peft.get_peft_model(model, config())
    assert all("lora_" in name for name in factors(model))
    assert len(factors(model)) == 2 * 2 * len(find_experts(model.get_base_model()))


def train(model: Any, steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(factors(model).values(), lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


AGAIN = """
import sys, torch, transformers, peft
import torch_moe_ops.transformers as moeq_transformers
base, adapter, ids, out = sys.argv[1:]
moeq_transformers.register(act_format="none")
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = peft.PeftModel.from_pretrained(moeq_transformers.prepare_for_peft(model), adapter)
with torch.no_grad():
    torch.save(model(input_ids=torch.load(ids), use_cache=False).logits, out)
"""


def test_trained_saved_and_loaded_in_another_process(tmp_path: Path) -> None:
    model = adapted()
    first, second = train(model)
    assert second < first
    model.save_pretrained(tmp_path / "adapter")
    model.eval()
    torch.save(IDS, tmp_path / "ids.pt")
    files = [str(path) for path in (CHECKPOINTS / QWEN, tmp_path / "adapter", tmp_path / "ids.pt", tmp_path / "out.pt")]
    subprocess.run([sys.executable, "-c", AGAIN, *files], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    # As equal as float32 products are from process to process: their order depends on addresses.
    assert relative_l2(torch.load(tmp_path / "out.pt"), logits(model)) <= 1e-6


def test_transformers_own_load_adapter(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    own = prepare_for_peft(packed())
    own.load_adapter(str(tmp_path))
    assert relative_l2(logits(own), logits(model)) <= 1e-6


def test_two_adapters_add_up_and_switch() -> None:
    model = adapted()
    one = logits(model)
    torch.manual_seed(1)
    model.add_adapter("other", config(rank=3))
    model.set_adapter("other")
    other = logits(model)
    assert relative_l2(one, other) > 1e-3
    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    assert relative_l2(both, one) > 1e-3
    model.set_adapter("default")
    assert torch.equal(logits(model), one)


def test_merging_quantizes_again(tmp_path: Path) -> None:
    model = adapted()
    base = model.get_base_model()
    raws = [moe.restore(found.module.moeq_weights.prepared) for found in find_experts(base)]
    wrapper = base.model.layers[0].mlp.experts
    inner = wrapper.base_layer
    named = {}
    for w in (wrapper, inner):
        which = "2" if w.parameter_name == "down_proj" else "13"
        a, b = w.lora_A["default"].weight.detach(), w.lora_B["default"].weight.detach()
        named[f"a{which}"] = a.reshape(w.num_experts, -1, a.shape[1])
        named[f"b{which}"] = b.reshape(b.shape[0], -1, w.num_experts).permute(2, 0, 1)
    expected = moe.merge_lora(raws[0], **named, scaling=2.0)
    adapted_logits = logits(model)
    merged = model.merge_and_unload()
    assert moe.restore(merged.model.layers[0].mlp.experts.moeq_weights.prepared).equal(expected)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert relative_l2(logits(merged), adapted_logits) < 0.2  # what quantizing anew costs
    merged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), logits(merged))


def test_merged_experts_stay_merged() -> None:
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"unmerge: (down|gate_up)_proj must not be merged, got packed experts"):
        model.unmerge_adapter()


def test_merge_aware_training_is_what_is_merged(tmp_path: Path) -> None:
    """Trained, with the adapter off and on, merged, written, read again: the same bits."""
    torch.manual_seed(0)
    base = packed()
    plain = logits(base)
    model = peft.get_peft_model(prepare_for_peft(base, merge_aware=True), config())
    first, second = train(model)
    assert second < first
    model.eval()
    trained = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), trained)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), trained)
    merged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), trained)
    assert not torch.equal(trained, plain)


@pytest.mark.parametrize("name", [QWEN, GPT_OSS])
def test_merge_aware_merges_once_for_each_step(name: str) -> None:
    """Also where rows alternate: forward passes whose backward is yet to come must not be written over."""
    model = peft.get_peft_model(prepare_for_peft(packed(name), merge_aware=True), config(name))
    logits(model)
    weights = [found.module.moeq_merge_aware.w.w13 for found in find_experts(model.get_base_model())]
    before = [w._version for w in weights]
    losses = [loss_of(model), loss_of(model)]
    for loss in losses:
        loss.backward()
    assert [w._version for w in weights] == before
    with torch.no_grad():
        next(iter(factors(model).values())).add_(0.1)
    logits(model)
    assert weights[0]._version > before[0]


def test_merge_aware_without_the_adapter_before_the_backward_pass() -> None:
    """As trainers that compare with the base model do; what is saved meanwhile is the base."""
    base = packed()
    plain = logits(base)
    kept = {name: t.clone() for name, t in base.state_dict().items()}
    model = peft.get_peft_model(prepare_for_peft(base, merge_aware=True), config())
    found = []
    for with_base in (False, True):
        model.zero_grad()
        loss = loss_of(model)
        if with_base:
            with model.disable_adapter():
                assert torch.equal(logits(model), plain)
        loss.backward()
        found.append([p.grad.clone() for p in factors(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    saved = {name.replace(".base_layer", ""): t for name, t in model.get_base_model().state_dict().items()}
    assert all(torch.equal(saved[name], t) for name, t in kept.items())


def test_merge_aware_follows_weights_that_move() -> None:
    """`model.to(device)` prepares other tensors, before training or after it."""
    torch.manual_seed(0)
    base = packed()
    plain = logits(base)
    model = peft.get_peft_model(prepare_for_peft(base, merge_aware=True), config())
    holders = [found.module.moeq_weights for found in find_experts(base)]

    def move() -> None:
        for holder in holders:
            holder.prepared = moe.prepare(moe.restore(holder.prepared), act_format="none")

    move()
    first = logits(model)
    assert not torch.equal(first, plain)
    move()
    assert torch.equal(logits(model), first)
    move()
    assert torch.equal(logits(model.merge_and_unload()), first)


def test_merge_aware_takes_one_adapter() -> None:
    model = peft.get_peft_model(prepare_for_peft(packed(), merge_aware=True), config())
    model.add_adapter("other", config())
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="merge_aware: at most one adapter must be active"):
        logits(model)


def test_gradient_checkpointing() -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss_of(model).backward()
        found.append([p.grad for p in factors(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_models_without_packed_experts() -> None:
    with pytest.raises(ValueError, match="model must have packed experts, got Qwen3MoeForCausalLM without"):
        prepare_for_peft(
            transformers.Qwen3MoeForCausalLM(
                transformers.Qwen3MoeConfig(
                    vocab_size=32,
                    hidden_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    moe_intermediate_size=16,
                    num_experts=4,
                    num_experts_per_tok=2,
                )
            )
        )


def test_transformers_trainer(tmp_path: Path) -> None:
    """It refuses quantized models, unless their quantizer says that adapters on them learn."""
    model = adapted()
    assert model.get_base_model().is_quantized
    settings = {"max_steps": 2, "report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), learning_rate=1e-2, **settings)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    before = {name: p.detach().clone() for name, p in factors(model).items()}
    trainer.train()
    assert all(not torch.equal(p, before[name]) for name, p in factors(model).items())


def test_shared_experts_inside_are_refused() -> None:
    """Adapters are of the routed experts alone: a pass with them would leave the others out."""
    folder = CHECKPOINTS / "deepseek_v3_modelopt_nvfp4"
    moeq_transformers.register(act_format="none", shared_experts=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    finally:
        moeq_transformers.register(act_format="none")
    with pytest.raises(ValueError, match="must hold routed experts alone, got 1 shared ones inside: attach_experts or"):
        prepare_for_peft(model)

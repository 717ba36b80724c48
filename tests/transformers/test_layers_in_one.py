"""Routers that run their experts too: which blocks allow it, and that a model's results stay what they were."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import tiny_model  # noqa: E402
from tolerances import relative_l2  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers import experts, layers_in_one, routers  # noqa: E402
from torch_moe_ops.transformers.layers_in_one import gives_experts_what_the_router_saw  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, whose backend never does both in one launch."""
    monkeypatch.setattr(routers, "package_reason", lambda: None)
    monkeypatch.setattr(routers, "KERNEL_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(experts.ExpertWeights, "takes_router", lambda self: not self.prepared.num_shared_experts)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which of the two functions ran, in order."""
    seen: list[str] = []
    for module, name in ((layers_in_one, "fused_moe_hidden"), (experts, "fused_moe_routed")):
        ours = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, ours=ours, **k: [seen.append(name), ours(*a, **k)][1])
    yield seen


def make(name: str) -> Any:
    model = tiny_model(name)
    moeq_transformers.quantize_model(model, "none")
    return model


def joined(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "moeq_layer", None) is not None]


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def apart(model: Any) -> Tensor:
    """A copy's logits, its routers and experts called one by one."""
    other = copy.deepcopy(model)
    for router in joined(other):
        router.moeq_layer = None
    return logits(other)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe"])
def test_a_layer_is_one_call(name: str, calls: list[str]) -> None:
    model = make(name)
    want = apart(model)
    assert calls and set(calls) == {"fused_moe_routed"}
    calls.clear()
    assert torch.equal(logits(model), want)
    assert calls == ["fused_moe_hidden"] * len(find_experts(model))
    assert all(found.module.moeq_weights.done is None for found in find_experts(model))


def test_in_a_compiled_model() -> None:
    model = make("qwen3_moe")
    compiled = torch.compile(
        lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        assert torch.equal(compiled(IDS), apart(model))
        assert torch.equal(compiled(IDS), apart(model))
    assert all(found.module.moeq_weights.done is None for found in find_experts(model))


def test_a_copy_runs_its_own_experts(calls: list[str]) -> None:
    model = make("qwen3_moe")
    other = copy.deepcopy(model)
    mine, theirs = joined(model)[0].moeq_layer.experts, joined(other)[0].moeq_layer.experts
    assert theirs is not mine and theirs is find_experts(other)[0].module
    assert torch.equal(logits(other), logits(model))
    assert calls == ["fused_moe_hidden"] * (2 * len(find_experts(model)))


@pytest.mark.parametrize("of", ["router", "experts"])
def test_hooks_that_change_what_one_of_them_sees(of: str, calls: list[str]) -> None:
    """A layer with such a hook runs as two calls, and the hook counts."""
    model = make("qwen3_moe")
    router = joined(model)[0]
    module = router if of == "router" else router.moeq_layer.experts
    module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))
    got = logits(model)
    assert calls == ["fused_moe_routed", *["fused_moe_hidden"] * (len(find_experts(model)) - 1)]
    assert torch.equal(got, apart(model)) and not torch.equal(got, logits(make("qwen3_moe")))


def _other_tensors(module: Any, args: Any, out: Any) -> Any:
    return out[0], out[1] * 0.5, out[2]


def _the_same_tensors(module: Any, args: Any, out: Any) -> None:
    out[1].mul_(0.5)


@pytest.mark.parametrize("hook", [_other_tensors, _the_same_tensors])
def test_a_hook_that_changes_what_was_chosen(hook: Any, calls: list[str]) -> None:
    model = make("qwen3_moe")
    joined(model)[0].register_forward_hook(hook)
    got = logits(model)
    assert calls == ["fused_moe_routed", *["fused_moe_hidden"] * (len(find_experts(model)) - 1)]
    assert torch.equal(got, apart(model)) and not torch.equal(got, logits(make("qwen3_moe")))


def test_results_of_another_call_of_the_router(calls: list[str]) -> None:
    """Experts that are called with other tensors than the router's run again."""
    router = joined(make("qwen3_moe"))[0]
    rows = torch.randn(3, router.weight.shape[1])
    with torch.no_grad():
        _, weights, ids = router(rows)
        got = router.moeq_layer.experts(rows, ids, weights * 0.5)
        assert calls == ["fused_moe_hidden", "fused_moe_routed"]
        torch.testing.assert_close(got, 0.5 * router.moeq_layer.experts(rows, ids, weights))


def test_other_hidden_states_than_the_router_saw() -> None:
    """As of a forward that was put in the place of the block's own after loading."""
    router = joined(make("qwen3_moe"))[0]
    experts, rows = router.moeq_layer.experts, torch.randn(3, router.weight.shape[1])
    with torch.no_grad():
        _, weights, ids = router(rows)
        got = experts(rows * 2, ids, weights)
        assert torch.equal(got, experts(rows * 2, ids, weights))


def test_hooks_of_transformers_that_look_on(calls: list[str]) -> None:
    model = make("qwen3_moe")
    with torch.no_grad():
        seen = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
    assert len(seen) == len(joined(model)) and joined(model)[0]._forward_hooks
    assert calls == ["fused_moe_hidden"] * len(joined(model))
    compiled = torch.compile(lambda ids: logits(model, ids), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(IDS), apart(model))


def test_a_sigmoid_of_one_expert_multiplies_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a router is "llama4", whose op multiplies what the experts get."""
    model = make("qwen3_moe")

    def one(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = nn.functional.linear(hidden_states, self.weight)
        weights, ids = torch.topk(torch.sigmoid(found.float()), 1)
        return found, weights, ids

    kind = type(joined(model)[0])
    monkeypatch.setattr(kind, "forward", one)
    want = logits(model)
    routers.replace_routers(model, find_experts(model))
    assert all(router.moeq_routing.options[:2] == ("llama4", 1) for router in joined(model))
    assert relative_l2(logits(model), want) < 1e-5


def test_experts_on_another_device(calls: list[str]) -> None:
    """Whoever put them there moves what they are called with."""
    router = joined(make("qwen3_moe"))[0]
    holder = router.moeq_layer.experts.moeq_weights
    holder.prepared = holder.prepared.to("meta")
    with torch.no_grad():
        found, weights, _ = router(torch.randn(3, router.weight.shape[1]))
    assert not calls and found.device.type == weights.device.type == "cpu"


def test_experts_attached_anew() -> None:
    model = make("qwen3_moe")
    before = logits(model)
    for found in find_experts(model):
        holder = found.module.moeq_weights
        holder.prepared = holder.prepared.to("cpu")
        holder.prepared.w2.mul_(2.0)
    after = logits(model)
    assert not torch.equal(before, after) and torch.equal(after, apart(model))


class Block(nn.Module):
    """A block whose forward is `how`."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.router, self.experts, self.how = nn.Linear(16, 4, bias=False), nn.Identity(), how

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.how(self, hidden_states)


def _plain(block: Any, x: Tensor) -> Tensor:
    rows = x.view(-1, 16)
    _, weights, ids = block.router(rows)
    return block.experts(rows, ids, weights).view_as(x)


def _router_gets_all(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x)
    return block.experts(x.reshape(-1, 16), ids, weights)


def _norm_between(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    return block.experts(x.view(-1, 16) * 2, ids, weights)


def _in_place(block: Any, x: Tensor) -> Tensor:
    rows = x.view(-1, 16)
    _, weights, ids = block.router(rows)
    return block.experts(rows.mul_(2), ids, weights)


def _weights_in_place(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    weights *= 2
    return block.experts(x.view(-1, 16), ids, weights)


def _ids_in_place(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    ids += 1
    return block.experts(x.view(-1, 16), ids, weights)


def _other_weights(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    return block.experts(x.view(-1, 16), ids, weights / weights.sum())


def _some_rows(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    return block.experts(x.view(-1, 16)[:1], ids, weights)


def _all_dimensions(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    return block.experts(x, ids, weights)


def _fails(block: Any, x: Tensor) -> Tensor:
    raise ValueError("it takes something else")


def _wants_more_columns(block: Any, x: Tensor) -> Tensor:
    _, weights, ids = block.router(x.view(-1, 16))
    return block.experts(x.view(-1, 16), ids, weights[:, 1])


@pytest.mark.parametrize(
    ("how", "fits"),
    [
        (_plain, True),
        (_router_gets_all, True),
        (_norm_between, False),
        (_in_place, False),
        (_weights_in_place, False),
        (_ids_in_place, False),
        (_other_weights, False),
        (_some_rows, False),
        (_all_dimensions, False),
        (_fails, False),
        (_wants_more_columns, False),
    ],
)
def test_which_blocks_allow_it(how: Any, fits: bool) -> None:
    block = Block(how)
    assert gives_experts_what_the_router_saw(block, block.router, block.experts) is fits


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        block = Block(_plain)
        assert gives_experts_what_the_router_saw(block, block.router, block.experts)
    assert "forward" not in block.router.__dict__ and "forward" not in block.experts.__dict__

"""moeq::route_hidden in place of the routers of transformers: the same experts, the same weights."""

from __future__ import annotations

import copy
import io
import logging
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from tolerances import F32, relative_l2
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import ARCHITECTURES, tiny_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers import routers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
# What is known of their routers; the experts of the others are chosen by their own operations.
METHODS = {
    "qwen3_moe": ("default", True),
    "qwen2_moe": ("default", False),
    "mixtral": ("default", True),
    "olmoe": ("default", False),
    "deepseek_v2": ("default", False),
    "deepseek_v3": ("deepseek_v3", True),
    "glm4_moe": ("deepseek_v3", True),
    "dots1": ("deepseek_v3", False),
    "minimax_m2": ("deepseek_v3", True),
    "lfm2_moe": ("deepseek_v3", True),
    "flex_olmo": ("default", False),
    "jamba": ("default", False),
    "granitemoe": ("default", True),
    "gpt_oss": ("default", True),
}
OWN = ["phimoe", "ernie4_5_moe", "llama4_text"]
# Routers that are known as newer releases have them, and left alone in 5.17.
NEWER = ["granitemoe"] if transformers.__version__.startswith("5.17.") else []


_TINY_LFM: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["conv", "full_attention"],
}


@pytest.fixture(autouse=True)
def triton_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing on CPUs is torch's, with Triton or without."""
    monkeypatch.setattr(routers, "package_reason", lambda: None)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "KERNEL_DEVICES", ("cpu", "cuda"))


def make(name: str) -> Any:
    if name != "gpt_oss":
        return tiny_model(name)
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "gpt_oss_mxfp4")
    del config.quantization_config
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def _in_block(model: Any) -> bool:
    """Whether the router is a linear, and the block that it is in does the rest: some models of older releases."""
    block = model.get_submodule(find_experts(model)[0].name.rpartition(".")[0])
    return type(getattr(block, "router", None)) is torch.nn.Linear


def routers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "moeq_routing")]


@pytest.mark.parametrize("name", [*METHODS, *OWN])
def test_logits_are_those_of_the_model_with_its_own_routers(name: str, everywhere: None) -> None:
    model = make(name)
    moeq_transformers.quantize_model(model, "none", route=False)
    assert not routers_of(model)
    want = logits(model)
    routers.replace_routers(model, find_experts(model))
    found = routers_of(model)
    known = name in METHODS and name not in NEWER and not _in_block(model)
    assert len(found) == (len(find_experts(model)) if known else 0)
    for router in found:
        method, _, _, _, _, renormalize = router.moeq_routing.options
        assert (method, renormalize) == METHODS[name]
    assert relative_l2(logits(model), want) < F32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_ids_are_exactly_those_of_the_torch_router(name: str, dtype: torch.dtype, everywhere: None) -> None:
    model = make(name)
    moeq_transformers.quantize_model(model, "none")
    if name in NEWER or _in_block(model):
        pytest.skip(f"this release of transformers chooses experts in the MoE block of {name}")
    router = routers_of(model)[-1].to(dtype)
    weight = router.weight
    hidden = torch.randn(500, weight.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    correction = (torch.randn(weight.shape[0]) * 0.2,) if name in ("minimax_m2", "lfm2_moe") else ()
    with torch.no_grad():
        got = router(hidden, *correction)
        want = routers._original(type(router))(router, hidden, *correction)
    assert torch.equal(got[0].float(), want[0].float())  # logits
    assert got[2].dtype == torch.int32
    order, our_order = want[2].argsort(-1), got[2].argsort(-1)
    theirs, ours = want[2].gather(1, order), got[2].gather(1, our_order)
    # bfloat16 logits tie; then any of the experts may be chosen.
    tied = torch.tensor([len(set(row.tolist())) < len(row) for row in want[0]])
    assert torch.equal(ours[~tied].long(), theirs[~tied]) and (~tied).sum() > 100
    weights, our_weights = want[1].gather(1, order).float(), got[1].gather(1, our_order)
    assert relative_l2(our_weights[~tied], weights[~tied]) < (F32 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "granitemoe", "gpt_oss"])
def test_of_equal_logits_the_lower_id_is_chosen(name: str, everywhere: None) -> None:
    """torch.topk takes any of them. The values that are chosen are the same, so the weights are too."""
    model = make(name)
    moeq_transformers.quantize_model(model, "none")
    if name in NEWER or _in_block(model):
        pytest.skip(f"this release of transformers chooses experts in the MoE block of {name}")
    router = routers_of(model)[-1].to(torch.bfloat16)
    router.weight.data[1:] = router.weight.data[0]  # all experts alike but the last
    router.weight.data[-1] *= 1.5
    if router._parameters.get("bias") is not None:
        router.bias.data.zero_()
    hidden = torch.randn(200, router.weight.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        logits, weights, ids = router(hidden)
        _, their_weights, _ = routers._original(type(router))(router, hidden)
    top_k, last = ids.shape[1], logits.shape[1] - 1
    best = (logits[:, last] > logits[:, 0])[:, None]
    lowest = torch.arange(top_k).expand(200, -1)
    with_last = torch.cat((torch.tensor([last]), torch.arange(top_k - 1))).expand(200, -1)
    assert torch.equal(ids.long().sort(-1).values, torch.where(best, with_last, lowest).sort(-1).values)
    assert relative_l2(weights.sort(-1).values, their_weights.float().sort(-1).values) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_model_that_is_asked_for_router_logits_gives_its_own(name: str, dtype: torch.dtype, everywhere: None) -> None:
    model = make(name).to(dtype)
    moeq_transformers.quantize_model(model, "none", route=False)
    with torch.no_grad():
        want = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
        routers.replace_routers(model, find_experts(model))
        assert routers_of(model)
        got = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
    assert len(got) == len(want) == len(find_experts(model))
    # The first ones come before any experts, whose weights differ by a rounding in bfloat16.
    assert torch.equal(got[0], want[0]) and all(a.dtype == b.dtype for a, b in zip(got, want, strict=True))
    assert all(relative_l2(a, b) < (F32 if dtype == torch.float32 else 2e-2) for a, b in zip(got, want, strict=True))


def test_a_router_whose_left_out_groups_may_be_chosen_keeps_its_own_operations() -> None:
    """A.X-K2's counts them as 0, which is more than a score that a negative correction makes less."""
    try:
        config = transformers.AutoConfig.for_model("axk2", n_group=4, topk_group=2, num_experts_per_tok=2)
    except (ValueError, KeyError):
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    from transformers.models.axk2 import modeling_axk2

    router = modeling_axk2.AXK2TopkRouter(config)
    assert router.num_group == 4
    assert routers.find_options(router) is None
    config.n_group = None  # as in the light ones
    found = routers.find_options(modeling_axk2.AXK2TopkRouter(config))
    assert found is not None and found.options[0] == "deepseek_v3"


def test_a_router_that_is_given_more_than_was_tried_runs_its_own_operations(
    monkeypatch: pytest.MonkeyPatch, everywhere: None
) -> None:
    model = tiny_model("deepseek_v3")
    moeq_transformers.quantize_model(model, "none")
    calls = _calls(monkeypatch)
    router = routers_of(model)[0]
    hidden = torch.randn(3, router.weight.shape[1])
    with torch.no_grad():
        router(hidden)
        with pytest.raises(TypeError, match="positional arguments"):
            router(hidden, torch.ones(router.weight.shape[0]))
    assert len(calls) == 1


def test_what_was_replaced_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_moe_ops")
    moeq_transformers.quantize_model(tiny_model("qwen3_moe"), "none")
    moeq_transformers.quantize_model(tiny_model("phimoe"), "none")
    assert "routers of Qwen3MoeForCausalLM on a GPU: 2 choose by 'default'" in caplog.text
    assert "routers of PhimoeForCausalLM on a GPU: 2 choose by 'its own operations'" in caplog.text


def test_a_router_without_its_correction_runs_its_own_operations(everywhere: None) -> None:
    config = {"use_expert_bias": False, "num_dense_layers": 0}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("lfm2_moe", **_TINY_LFM, **config), dtype=torch.float32
    ).eval()
    moeq_transformers.quantize_model(model, "none", route=False)
    want = logits(model)
    routers.replace_routers(model, find_experts(model))
    assert relative_l2(logits(model), want) < F32


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    inner = routers._route
    monkeypatch.setattr(routers, "_route", lambda *args: calls.append(args) or inner(*args))
    return calls


def test_other_devices_and_gradients_keep_the_torch_router(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    moeq_transformers.quantize_model(model, "none")
    calls = _calls(monkeypatch)
    logits(model)
    assert not calls
    monkeypatch.setattr(routers, "KERNEL_DEVICES", ("cpu",))
    logits(model)
    assert len(calls) == 2
    router = routers_of(model)[0]
    scores = router(torch.randn(3, 64))[1]
    assert len(calls) == 2 and scores.requires_grad
    with torch.no_grad():
        router.train()(torch.randn(3, 64))
    assert len(calls) == 2


def test_copies_and_pickles_route_alike(monkeypatch: pytest.MonkeyPatch, everywhere: None) -> None:
    model = tiny_model("deepseek_v3")
    moeq_transformers.quantize_model(model, "none")
    file = io.BytesIO()
    torch.save(model, file)
    pickled = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    want = logits(model)
    calls = _calls(monkeypatch)
    for other in (copy.deepcopy(model), pickled):
        assert torch.equal(logits(other), want)
    assert len(calls) == 2  # a layer without experts comes first


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "minimax_m2")]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", *_SLOW])
def test_one_graph(name: str, everywhere: None) -> None:
    model = make(name)
    moeq_transformers.quantize_model(model, "nvfp4")
    assert routers_of(model)
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: logits(model, ids), fullgraph=True, backend="aot_eager")
    assert relative_l2(compiled(IDS), logits(model)) < F32


def test_logits_that_are_no_plain_product_keep_the_router() -> None:
    """A cap bends logits after the product, which moeq::route_hidden would not see."""
    linear = type(next(m for m in make("qwen3_moe").modules() if type(m).__name__.endswith("TopKRouter")))
    router = next(m for m in make("qwen3_moe").modules() if isinstance(m, linear))
    assert routers.find_options(router) is not None
    plain = linear.forward

    def capped(self: Any, hidden_states: Tensor, *given: Any) -> Any:
        logits, weights, ids = plain(self, hidden_states, *given)
        return torch.tanh(logits / 30) * 30, weights, ids

    kind = type("Capped", (linear,), {"forward": capped})
    router.__class__ = kind
    assert routers.find_options(router) is None


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_results_in_another_order_keep_the_router(order: tuple[int, ...]) -> None:
    """As an older release of transformers has it: ids first, whose shape is not that of logits."""
    router = next(m for m in make("qwen3_moe").modules() if type(m).__name__.endswith("TopKRouter"))
    plain = type(router).forward

    def reordered(self: Any, hidden_states: Tensor) -> Any:
        results = plain(self, hidden_states)
        return tuple(results[i] for i in order)

    router.__class__ = type("Reordered", (type(router),), {"forward": reordered})
    assert routers.find_options(router) is None


def test_without_triton_routers_stay(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "package_reason", lambda: "the triton package must be importable, got none")
    model = make("qwen3_moe")
    moeq_transformers.quantize_model(model, "none")
    assert not routers_of(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_router_is_recognized_whatever_torchs_default_dtype(name: str, everywhere: None) -> None:
    model, before = make(name), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        routers.replace_routers(model, find_experts(model))
    finally:
        torch.set_default_dtype(before)
    found = {(router.moeq_routing.options[0], router.moeq_routing.options[-1]) for router in routers_of(model)}
    assert found == {METHODS[name]}


def test_every_architecture_has_a_router_that_is_known_or_left_alone() -> None:
    assert set(METHODS) - {"gpt_oss"} | set(OWN) == set(ARCHITECTURES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name in METHODS if name != "gpt_oss"])  # its mask copies from the host
def test_on_a_gpu_in_a_graph(name: str) -> None:
    """Captured in bfloat16: in float32 such experts run on the reference, which waits for the device."""
    if name in NEWER:
        pytest.skip(f"this release of transformers chooses experts of {name} by operations of its own")
    pytest.importorskip("triton", reason="needs Triton")
    model = make(name).cuda()
    moeq_transformers.quantize_model(model, "none", route=False)
    ids = IDS.cuda()
    want = logits(model, ids)
    routers.replace_routers(model, find_experts(model))
    assert relative_l2(logits(model, ids), want) < 1e-4
    model = make(name).bfloat16().cuda()
    moeq_transformers.quantize_model(model, "none")
    want = logits(model, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = logits(model, ids)
    graph.replay()
    assert torch.equal(out, want)

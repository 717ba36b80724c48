"""Our experts inside vLLM's modular kernel, with its own prepare and finalize steps, on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES
from cuda_graphs import captured
from paths import PROGRAMS, ROOT
from torch import Tensor
from vllm_checkpoints import graft
from vllm_layers import FIXTURE_OF, config_of, in_vllm, layer_of, load, routing_of, whole
from vllm_reference import disagreements, reference_model
from vllm_runs import INSTALLED, NOT_INSTALLED

import torch_moe_ops as moe

pytestmark = pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)
RANKS, TOKENS = 2, 9
EXCHANGED = "tokens exchanged by allgather_reducescatter"
# What is on one of two ranks -> a model: half of its experts, or of each; half of Mixtral's are no whole blocks of NVFP4.
HALVED = {"parallel": "mixtral_modelopt_nvfp4", "divided": "qwen3_moe_ct_fp8_channel"}
FORMS = [("rows", "linear"), ("rows", "round_robin"), ("batches", "linear")]


def _step(form: str, experts_here: int, rank: int) -> Any:
    """A prepare and finalize step of vLLM that needs no other process: tokens of all ranks, in rows or batches."""
    from vllm.model_executor.layers.fused_moe import prepare_finalize as steps

    if form == "rows":
        return steps.make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

    return BatchedPrepareAndFinalize(16, experts_here, RANKS, rank)


@pytest.mark.parametrize("form, placement", FORMS)
@pytest.mark.parametrize("case", ["nvfp4", "ct_mxfp4", "ct_int4", "fp8_block"])
def test_ranks_add_up_to_the_layer(case: str, form: str, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_ops.vllm import modular

    model, config = config_of(FIXTURE_OF[case])
    x = torch.randn(TOKENS, model["hidden_size"], generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    total = torch.zeros(x.shape)
    asked: list[dict[str, Any]] = []
    with in_vllm():
        for rank in range(RANKS):
            layer = layer_of(model, config, (1, RANKS, placement), rank, dp=RANKS)

            def step(layer: Any = layer, rank: int = rank, **options: Any) -> Any:
                asked.append(options)
                return _step(form, layer.local_num_experts, rank)

            monkeypatch.setattr(modular, "maybe_make_prepare_finalize", step)
            load(layer, FIXTURE_OF[case])
            method = layer.quant_method
            assert method.supports_internal_mk, "vLLM's runner must leave the exchange to the kernel"
            assert isinstance(method.moe_kernel.fused_experts, modular.MoeqExperts)
            ids, weights = routing_of(layer.global_num_experts)
            total += layer.forward_modular(x, weights, ids).float()
    expected = whole(FIXTURE_OF[case], x, ids, weights, "none").float()
    assert (total - expected).norm() <= 6e-3 * expected.norm()
    assert [options["moe"].dp_size for options in asked] == [RANKS, RANKS]
    assert not any(options["quant_config"].is_quantized or options["use_monolithic"] for options in asked)


@pytest.mark.parametrize("form", ["rows", "batches"])
def test_weights_on_the_input_are_multiplied_once(form: str) -> None:
    """By the step that sends tokens: the experts are prepared without."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from torch_moe_ops.vllm.modular import experts_for, no_weights

    fixture = FIXTURE_OF["nvfp4"]
    model, config = config_of(fixture)
    raw = moe.load_experts(FIXTURES / fixture, layer=1)
    expected_by = moe.prepare(raw, backend="reference", act_format="none", router_weight_on_input=True)
    x = torch.randn(TOKENS, raw.hidden_size).to(torch.bfloat16)
    ids, weights = (t[:, :1].contiguous() for t in routing_of(raw.num_experts))
    with in_vllm():
        layer = layer_of(model, config, (1, 1, "linear"), 0)
        step = _step(form, raw.num_experts, 0)
        experts = experts_for(step, layer.moe_config, moe.prepare(raw, act_format="none"), False)
        sizes = no_weights(raw.num_experts, 2 * raw.intermediate_size, raw.hidden_size, x.device)
        given = {"activation": MoEActivation.SILU, "global_num_experts": raw.num_experts, "expert_map": None}
        found = mk.FusedMoEKernel(step, experts).apply(
            x.clone(), *sizes, weights, ids, apply_router_weight_on_input=True, **given
        )
    expected = moe.fused_moe_routed(x, ids, weights, expected_by).float()
    # The step rounds the product to bfloat16, the op does not.
    assert (found.float() - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside vLLM")
def test_the_kernel_is_captured_in_a_cuda_graph() -> None:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.v1.worker.workspace import init_workspace_manager

    from torch_moe_ops.vllm.modular import experts_for, no_weights

    fixture = FIXTURE_OF["nvfp4"]
    model, config = config_of(fixture)
    raw = moe.load_experts(FIXTURES / fixture, layer=1, device="cuda")
    weights = moe.prepare(raw, act_format="none")
    x = torch.randn(TOKENS, raw.hidden_size, device="cuda", dtype=torch.bfloat16)
    ids, factors = (t.cuda() for t in routing_of(raw.num_experts))
    sizes = no_weights(raw.num_experts, 2 * raw.intermediate_size, raw.hidden_size, x.device)
    with in_vllm():
        init_workspace_manager(x.device)
        step = _step("rows", raw.num_experts, 0)
        layer = layer_of(model, config, (1, 1, "linear"), 0)
        kernel = mk.FusedMoEKernel(step, experts_for(step, layer.moe_config, weights, False))
        given = {"activation": MoEActivation.SILU, "global_num_experts": raw.num_experts, "expert_map": None}

        def run() -> Tensor:
            return kernel.apply(x, *sizes, factors, ids, apply_router_weight_on_input=False, **given)

        graph, result = captured(run)
    x.copy_(torch.randn_like(x))
    ids.copy_(ids.flip(0))
    graph.replay()
    expected = moe.fused_moe_routed(x, ids, factors, weights)
    assert torch.equal(result, expected)


def test_rows_that_are_no_tokens_are_given_to_no_expert() -> None:
    from torch_moe_ops.vllm.modular import ids_of_batches

    ids = ids_of_batches(torch.tensor([2, 0, 3]), 3, 4)
    assert ids.tolist() == [[4], [4], [-1], [-1], [-1], [-1], [6], [6], [6]]
    assert ids.dtype == torch.int32


def test_a_deployment_without_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_ops.vllm import modular

    monkeypatch.setattr(modular, "maybe_make_prepare_finalize", lambda **_: None)
    layer = Namespace(moe_config=Namespace(moe_parallel_config="such"), _expert_routing_tables=lambda: None)
    with pytest.raises(ValueError, match="prepare and finalize step for such, got none"):
        modular.kernel_of(layer, None, False)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("experts", HALVED)
def test_two_ranks_of_data_parallelism_generate_the_same_tokens(experts: str, tmp_path: Path) -> None:
    """Two processes of LLM.generate, other prompts in each, over gloo: whole experts, or a half of each on a rank."""
    folder = graft(FIXTURES / HALVED[experts], tmp_path / "model")
    results = _generate(folder, experts == "parallel", tmp_path)
    model = reference_model(folder)
    for rank, result in enumerate(results):
        assert "error" not in result, result["written"][-4000:]
        assert f"backend cpu, weight-only, {EXCHANGED} (first in" in result["written"]
        _, wrong = disagreements(model, result["prompts"], result["tokens"])
        assert not wrong, f"rank {rank}: {wrong}"
    assert results[0]["prompts"] != results[1]["prompts"]


def _generate(folder: Path, expert_parallel: bool, tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank's process says."""
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(tmp_path / f"rank{rank}.log", "w")) for rank in range(RANKS)]
        program = [sys.executable, str(PROGRAMS / "vllm_data_parallel.py"), str(folder), str(int(expert_parallel))]
        port = str(_free_port())
        # vLLM's workers find the plug-in beside the tests, wherever the package is installed from.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        started = [
            subprocess.Popen([*program, port, str(rank)], stdout=log, stderr=subprocess.STDOUT, env=environment)
            for rank, log in enumerate(logs)
        ]
        try:
            for process in started:
                process.wait(timeout=1700)
        finally:
            for process in started:
                process.kill()
    results = []
    for rank in range(RANKS):
        text = (tmp_path / f"rank{rank}.log").read_text()
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        assert lines, text[-4000:]
        results.append({**json.loads(lines[-1].removeprefix("RESULT ")), "written": text})
    return results


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

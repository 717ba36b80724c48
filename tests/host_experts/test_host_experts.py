"""A layer divided between a device and the host computes what the whole layer does; here the device is the CPU too."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from host_cases import NEIGHBOUR, SUMS, batch, divided, result, whole
from paths import ROOT, TESTS
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core import extension
from torch_moe_ops.core.schemes import SCHEMES

needs_kernels = pytest.mark.skipif(not extension.has_cpu_extension(), reason=extension.cpu_extension_reason() or "")
CASES = [
    *(Case(scheme=name, experts=6, hidden=128, inter=64, tokens=7) for name in SCHEMES),
    Case(scheme="nvfp4", act_format="nvfp4", experts=6, input_scale="expert"),
    Case(scheme="fp8", act_format="fp8", experts=6, input_scale="tensor", bias=True),
    Case(scheme="none", activation="relu2_no_mul", experts=6, bias=True, foreign=True),
    Case(scheme="mxfp4", dtype=torch.float16, experts=6, inter=64),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.scheme}-{case.act_format}-{case.activation}")
def test_parts_add_up_to_the_whole_layer(case: Case) -> None:
    w, given = whole(case), batch(case)
    expected = result(w, given, torch.float32)
    for host in (2, [0, 3, 5]):
        layer = divided(case, host)
        torch.testing.assert_close(layer(*given, torch.float32), expected, **SUMS)
        rounded = layer(*given)
        assert rounded.dtype == case.dtype
        torch.testing.assert_close(rounded, expected.to(case.dtype), **NEIGHBOUR)


@needs_kernels
@pytest.mark.parametrize("host", [0, 6])
def test_all_experts_on_one_side_give_the_bits_of_the_whole_layer(host: int) -> None:
    case = Case(experts=6)
    w, given = whole(case), batch(case)
    assert torch.equal(divided(case, host)(*given), result(w, given, torch.bfloat16))


@needs_kernels
def test_more_rows_than_cross_at_once_give_the_same_bits() -> None:
    case = Case(experts=6, tokens=23)
    given = batch(case)
    expected = divided(case, 3)(*given)
    assert torch.equal(divided(case, 3, max_tokens=5)(*given), expected)


def test_ids_of_nobody_and_other_shapes() -> None:
    case = Case(experts=6)
    hidden, ids, weights = batch(case)
    layer = divided(case, 3)
    foreign = ids.clone()
    foreign[0] = torch.tensor([-1, 6])
    foreign[1, 0] = 2**31 - 1
    expected = result(whole(case), (hidden, foreign, weights), torch.float32)
    torch.testing.assert_close(layer(hidden, foreign.long(), weights, torch.float32), expected, **SUMS)
    assert not expected[0].any() and not layer(hidden, foreign, weights)[0].any()
    by_batch = layer(hidden.view(1, 5, -1), ids.view(1, 5, -1), weights.view(1, 5, -1))
    assert torch.equal(by_batch, layer(hidden, ids, weights).view(1, 5, -1))
    assert layer(hidden[:0], ids[:0], weights[:0]).shape == (0, case.hidden)
    strided = torch.cat((hidden, hidden), 1)[:, : case.hidden]
    assert torch.equal(layer(strided, ids, weights.bfloat16().float()), layer(hidden, ids, weights.bfloat16()))


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])  # of fp8 the kernels get alphas that are made for a call
def test_the_least_asked_for_go_to_the_host_and_are_exchanged_by_load(scheme: str) -> None:
    case = Case(scheme=scheme, experts=6, act_format=scheme, input_scale="expert", tokens=9)
    given = batch(case)
    counts = torch.tensor([5, 0, 7, 1, 7, 0])
    layer = divided(case, 3, load=counts)
    assert layer.split.host == (1, 3, 5) and layer.split.device == (0, 2, 4)
    assert divided(case, 2).split.host == (4, 5)
    expected = result(whole(case), given, torch.float32)
    torch.testing.assert_close(layer(*given, torch.float32), expected, **SUMS)
    assert torch.equal(layer.load, torch.bincount(given[1].flatten(), minlength=6))

    parts = [t for w in (layer.on_device, layer.on_host) for t in w.tensors().values()]
    addresses = [t.data_ptr() for t in parts]
    layer.load.copy_(torch.tensor([0, 1, 2, 3, 4, 5]))
    layer.rebalance()
    assert layer.split.host == (0, 1, 2)
    assert [t.data_ptr() for w in (layer.on_device, layer.on_host) for t in w.tensors().values()] == addresses
    torch.testing.assert_close(layer(*given, torch.float32), expected, **SUMS)
    share = moe.restore(layer.on_host)
    assert torch.equal(share.w13, make_raw(case).w13[:3])
    with pytest.raises(ValueError, match="host_experts must be 3 ids as before, got 2"):
        layer.rebalance([0, 1])


@needs_kernels
def test_updated_weights_of_the_host_are_those_that_run() -> None:
    """Also what its jobs were given in place of them: here scales that are brought to one dtype."""
    case = Case(scheme="int4", experts=6, tokens=9)
    raw, given = make_raw(case), batch(case)
    mixed = dataclasses.replace(raw, w2_scale=raw.w2_scale.float(), w13_scale=raw.w13_scale.bfloat16())
    layer = moe.HostExperts(mixed, 3, act_format="none")
    before = layer(*given, torch.float32)
    doubled = dataclasses.replace(mixed, w13_scale=mixed.w13_scale * 2)
    for part, experts in ((layer.on_device, layer.split.device), (layer.on_host, layer.split.host)):
        part.update_(layer.split.share(doubled, experts))
    expected = result(moe.prepare(doubled, act_format="none"), given, torch.float32)
    torch.testing.assert_close(layer(*given, torch.float32), expected, **SUMS)
    assert not torch.allclose(before, expected, rtol=0.1)


@needs_kernels
def test_shared_experts_lie_on_the_device() -> None:
    case = Case(experts=6, top_k=2)
    raw = make_raw(case)
    both = moe.with_shared_experts(raw, make_raw(Case(experts=1, seed=3)))
    layer, w = moe.HostExperts(both, 6, act_format="none"), moe.prepare(both, act_format="none")
    assert layer.split.device == (6,)
    hidden, _, _ = batch(case)
    logits, gates = torch.randn(5, 6), torch.rand(5, 1)
    routing = moe.Routing("renormalize", top_k=2)
    expected = moe.fused_moe(hidden, logits, w, routing=routing, shared_expert_weights=gates)
    got = layer.fused(hidden, logits, routing=routing, shared_expert_weights=gates)
    torch.testing.assert_close(got, expected, **NEIGHBOUR)
    with pytest.raises(RuntimeError, match=r"HostExperts: router_logits must have 6 columns, .* got \(5, 7\)"):
        layer.fused(hidden, torch.randn(5, 7), routing=routing)
    with pytest.raises(ValueError, match="routed experts"):
        moe.HostExperts(both, [6])


def test_compiled_without_a_break() -> None:
    case = Case(experts=6)
    layers = [divided(case, host) for host in (2, [0, 1])]

    def step(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden = hidden + layer(hidden, ids, weights)
        return hidden

    given = batch(case)
    expected = step(*given)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(*given), expected, **NEIGHBOUR)
    before = layers[0].load.clone()
    compiled(*given)
    assert (layers[0].load - before).sum() == given[1].numel()


def test_no_gradient_by_name() -> None:
    case = Case(experts=6)
    hidden, ids, weights = batch(case)
    out = divided(case, 2)(hidden.requires_grad_(), ids, weights)
    with pytest.raises(RuntimeError, match="moeq::host_experts: inputs must be detached"):
        out.sum().backward()


@needs_kernels
def test_jobs_are_run_by_number_from_any_thread_and_end_with_their_layer() -> None:
    """What a host node of a CUDA graph does, on a thread that torch has not seen before."""
    case = Case(experts=6, tokens=3)
    layer, given = divided(case, 6), batch(case)
    expected = layer(*given)
    (job,) = layer._host._jobs.values()
    rows = layer.staging.rows(3, 2, torch.bfloat16)

    def run_again() -> torch.Tensor:
        rows.out.fill_(7.0)
        thread = threading.Thread(target=torch.ops.moeq_C.run_host_job, args=(job,))
        thread.start()
        thread.join()
        return rows.out.to(torch.bfloat16)

    assert torch.equal(run_again(), expected)
    rows.places.fill_(-1)  # nothing for the host: zeros
    assert not run_again().any()
    del layer
    gc.collect()
    assert torch.equal(run_again(), torch.full_like(expected, 7.0))


@needs_kernels
def test_layers_of_a_size_share_their_staging_memory() -> None:
    case = Case(experts=6)
    first, second = divided(case, 2), divided(case, 3)
    assert first.staging is second.staging and divided(case, 2, max_tokens=7).staging is not first.staging
    given = batch(case)
    alone = [layer(*given) for layer in (first, second)]
    assert torch.equal(first(*given), alone[0]) and torch.equal(second(*given), alone[1])


@needs_kernels
def test_dtype_of_unquantized_experts_is_demanded_of_the_host_too() -> None:
    case = Case(scheme="none", experts=6)
    hidden, ids, weights = batch(case)
    with pytest.raises(RuntimeError, match=r"moeq::moe_routed: w13 must have dtype torch\.float32"):
        divided(case, 6)(hidden.float(), ids, weights)


@needs_kernels
def test_hidden_states_that_a_part_does_not_take_are_refused_by_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(experts=6)
    monkeypatch.setitem(BACKENDS, "cpu", dataclasses.replace(BACKENDS["cpu"], hidden_dtypes=(torch.bfloat16,)))
    layer, (hidden, ids, weights) = divided(case, 3), batch(case)
    assert layer(hidden.bfloat16(), ids, weights).isfinite().all()
    with pytest.raises(
        RuntimeError, match=r"moeq::host_experts: hidden_states must have one of the dtypes \['torch\.bfloat16'\], got"
    ):
        layer(hidden.half(), ids, weights)


# A driver with one function, which does at once what the real one does when the stream gets there: on another thread.
DRIVER = """
#include <thread>
extern "C" int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  if (stream == nullptr) return 400;
  std::thread(function, data).join();
  return 0;
}
"""
PROGRAM = """
import torch
from host_cases import batch, divided
from problems import Case

case = Case(experts=6, tokens=3)
layer = divided(case, 6)
expected = layer(*batch(case), torch.float32)
(job,) = layer._host._jobs.values()
out = layer.staging.rows(3, 2, torch.bfloat16).out
out.zero_()
torch.ops.moeq_C.enqueue_host_job(job, 1)
assert torch.equal(out, expected) and expected.any()
try:
    torch.ops.moeq_C.enqueue_host_job(job, 0)
except RuntimeError as error:
    assert "stream must take a host function: cuLaunchHostFunc returned CUresult 400" in str(error), error
else:
    raise AssertionError("an error of the driver was lost")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a driver")
@needs_kernels
def test_a_stream_runs_the_job_by_the_driver_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="moeq::enqueue_host_job: stream must take a host function: "):
        torch.ops.moeq_C.enqueue_host_job(1, 0)
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    command = [compiler, "-shared", "-fPIC", "-pthread", "-x", "c++", "-o", str(tmp_path / "libcuda.so.1"), "-"]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS / "support")))}
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | paths, check=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host_experts": 7}, r"host_experts must be in 0 \.\.\. 6 \(experts\), got 7"),
        ({"host_experts": [1, 1]}, r"host_experts must be ids in 0 \.\.\. 5 \(routed experts\), each once"),
        ({"host_experts": [6]}, r"host_experts must be ids in 0 \.\.\. 5"),
        ({"host_experts": "3"}, "host_experts must be a number or ids, got str"),
        ({"host_experts": True}, "host_experts must be a number or ids, got bool"),
        ({"host_experts": [1], "load": [0] * 6}, "load must be None where host_experts names ids"),
        ({"host_experts": 1, "load": [0] * 5}, r"load must be \[6\] counts \(experts\), got \(5,\)"),
        ({"host_experts": 1, "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"host_experts": 1, "backend": "nothing"}, "nothing"),
    ],
)
def test_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        moe.HostExperts(make_raw(Case(experts=6)), **arguments)
    with pytest.raises(TypeError, match="raw must be RawWeights, got PreparedWeights"):
        moe.HostExperts(whole(Case()), 1)


def test_explains_the_split() -> None:
    layer = divided(Case(experts=6), [0, 2, 3])
    text = str(moe.explain(layer))
    assert "experts: 3 on cpu, 3 on the host" in text
    assert "    host: experts 0, 2-3, backend " in text and "    device: experts 1, 4-5, backend " in text
    assert moe.explain(layer).on_host == (0, 2, 3)
    assert all(f"\non the {where}:\n" in text for where in ("device", "host"))
    assert "crossing: nothing" in str(divided(Case(experts=6), 0).explain())

"""Choosing a backend: explain, force, refuse; nothing is silent."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
from problems import Case, make_raw
from torch.testing._internal.common_utils import TestCase, run_tests

import torch_moe_ops as moe
from torch_moe_ops import backends
from torch_moe_ops.backends import BACKENDS, register, triton
from torch_moe_ops.backends.explain import default_on
from torch_moe_ops.backends.registry import Backend, available, formats, one_of
from torch_moe_ops.core.schemes import SCHEMES

PROBLEM = moe.Problem("nvfp4", act_format="nvfp4", num_experts=8, hidden_size=64, intermediate_size=48)


class TestExplain(TestCase):
    def test_a_gpu_problem_on_every_backend(self) -> None:
        problem = dataclasses.replace(PROBLEM, device="cuda", capability=(9, 0))
        lines = str(moe.explain(problem)).splitlines()
        self.assertTrue(
            lines[0].startswith("Problem(scheme='nvfp4', act_format='nvfp4', activation='silu', device='cuda'")
        )
        names = [line.split()[1] for line in lines[1:]]
        self.assertEqual(names, list(BACKENDS))
        cpu = next(line for line in lines if line.split()[1] == "cpu")
        self.assertIn("device must be one of ['cpu'], got 'cuda'", cpu)

    def test_every_reason_is_listed(self) -> None:
        problem = dataclasses.replace(PROBLEM, device="cuda", scheme="unknown")
        against = moe.explain(problem).against["cpu"]
        self.assertTrue(any("device must be" in reason for reason in against))
        self.assertTrue(any("scheme must be" in reason for reason in against))


def test_every_file_that_registers_is_imported() -> None:
    """One that is not would be no backend, without a word."""
    folder = Path(backends.__file__).parent
    files = {
        path.stem for path in folder.glob("*.py") if re.search(r"^\s*(return )?register\(", path.read_text(), re.M)
    }
    missing = files - set(backends.__all__)
    assert files and not missing, f"import in torch_moe_ops/backends/__init__.py, and name in __all__: {missing}"


def test_auto_prefers_cpu_to_reference() -> None:
    w = moe.prepare(make_raw(Case()), backend="auto")
    assert w.backend == "cpu"
    assert moe.explain(w).chosen == "cpu"
    assert "-> cpu" in str(moe.explain(w))


@pytest.mark.parametrize("scheme", ("fp8", "fp8_block", "mxfp8", "int8"))
def test_hopper_kernels_of_bytes_are_taken(scheme: str) -> None:
    problem = dataclasses.replace(PROBLEM, scheme=scheme, act_format="none", device="cuda", capability=(9, 0))
    assert default_on(problem) == "cuda_sm90"


def test_reference_is_taken_only_where_nothing_else_fits() -> None:
    problem = dataclasses.replace(PROBLEM, device="xpu")
    explanation = moe.explain(problem)
    others = [name for name, reasons in explanation.against.items() if not reasons and name != "reference"]
    assert others == []
    assert explanation.chosen == "reference"


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_BACKEND", "reference")
    assert moe.prepare(make_raw(Case())).backend == "reference"
    assert moe.prepare(make_raw(Case()), backend="cpu").backend == "cpu"  # the argument wins
    monkeypatch.setenv("MOEQ_BACKEND", "nonsense")
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got 'nonsense'"):
        moe.prepare(make_raw(Case()))


def test_a_forced_backend_that_does_not_fit_raises_with_the_table() -> None:
    problem_raw = make_raw(Case())
    with pytest.raises(
        ValueError, match=r"(?s)backend 'cpu' cannot run this problem\nProblem\(.*device must be one of"
    ):
        moe.prepare(problem_raw, backend="cpu", device="meta")


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(ValueError, match="backend 'reference' is registered already"):
        register(BACKENDS["reference"])


def test_explain_takes_raw_weights_and_settings() -> None:
    raw = make_raw(Case(input_scale="expert", per_half=True))
    problem = moe.explain(raw, act_format="nvfp4").problem
    assert (problem.input_scale, problem.per_half_alphas) == ("expert", True)
    assert moe.explain(raw, act_format="none").problem.input_scale == "none"
    with pytest.raises(TypeError, match="what must be PreparedWeights, RawWeights or Problem, got int"):
        moe.explain(3)  # type: ignore[arg-type]


def test_explain_takes_prepares_arguments_and_no_others() -> None:
    raw = make_raw(Case(activation="swigluoai"))
    assert moe.explain(raw, swiglu_limit=5.0, act_format="none", num_experts=9).problem.num_experts == 9
    with pytest.raises(TypeError, match="junk"):
        moe.explain(raw, junk=1)
    with pytest.raises(TypeError, match=r"\['act_format'\] go with raw weights or a config, got Problem"):
        moe.explain(PROBLEM, act_format="none")
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        moe.explain(raw, backend="bogus")
    with pytest.raises(TypeError, match="config must be given with quant_config"):
        moe.explain(quant_config=moe.config.FUSED_MOE_UNQUANTIZED_CONFIG)


@pytest.mark.parametrize(
    ("requirement", "problem", "text"),
    [
        (one_of("scheme", "mxfp4"), PROBLEM, "scheme must be one of ['mxfp4'], got 'nvfp4'"),
        (one_of("top_k", 1, 2), PROBLEM, None),  # unknown decides nothing
        (formats({"nvfp4": ("none",)}), PROBLEM, "act_format must be one of ['none'] for scheme 'nvfp4', got 'nvfp4'"),
        (formats({"none": ("none",)}), PROBLEM, "scheme must be one of ['none'], got 'nvfp4'"),
        (available(lambda: "package 'x' is not installed"), PROBLEM, "package 'x' is not installed"),
        (available(lambda: None), PROBLEM, None),
    ],
)
def test_requirements_give_their_reason(requirement: object, problem: moe.Problem, text: str | None) -> None:
    assert requirement.unmet(problem) == text  # type: ignore[attr-defined]


def test_a_reason_for_a_missing_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_ops.core import extension

    monkeypatch.setattr(extension, "cpu_extension_reason", lambda: "torch_moe_ops._C was not compiled")
    explanation = moe.explain(PROBLEM)
    assert explanation.against["cpu"] == ["torch_moe_ops._C was not compiled"]
    assert explanation.chosen == "reference"


def test_a_new_backend_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(call: object, out: torch.Tensor) -> None:
        calls.append(call)
        out.fill_(7)

    monkeypatch.setitem(BACKENDS, "mine", dataclasses.replace(BACKENDS["reference"], name="mine", run=run))
    w = moe.prepare(make_raw(Case()), backend="mine")
    x = torch.zeros(3, 64).bfloat16()
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    assert torch.equal(moe.fused_moe_routed(x, ids, weights, w), torch.full((3, 64), 7.0).bfloat16())
    assert len(calls) == 1


@pytest.mark.parametrize("backend", [b for b in BACKENDS.values() if b.delegate], ids=lambda b: b.name)
def test_a_backend_that_hands_work_to_another_says_so(backend: Backend) -> None:
    other = BACKENDS[backend.delegate]
    assert other.layout is backend.layout, "the same tensors"
    for top_k in (None, 8):
        problem = moe.Problem("none", device="cuda", capability=(9, 0), num_experts=64, hidden_size=64, intermediate_size=64, top_k=top_k)  # fmt: skip
        assert f"{other.name}'s kernels below" in backend.notes(problem)
    # What this one needs holds what the other needs of the machine.
    for device, capability in (("cpu", None), ("cuda", (8, 0))):
        elsewhere = dataclasses.replace(problem, device=device, capability=capability)
        assert backend.reasons(elsewhere) or not other.reasons(elsewhere)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("capability", (None, (9, 0), (10, 0)))
def test_a_problem_of_unknown_sizes_is_explained(
    scheme: str, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is installed: Triton's kernels take part in what other backends say."""
    monkeypatch.setattr(triton, "package_reason", lambda: None)
    device = "cpu" if capability is None else "cuda"
    known = ({}, {"hidden_size": 256}, {"intermediate_size": 256}, {"num_experts": 8, "top_k": 2})
    for act, sizes in itertools.product(SCHEMES[scheme].act_formats, known):
        found = moe.explain(moe.Problem(scheme, act, device=device, capability=capability, **sizes))
        assert set(found.notes) == set(BACKENDS) and str(found)
        # What needs no sizes is said all the same.
        assert found.notes["reference"] and found.notes["triton_fp8"] and found.notes["cuda_sm90_fp8"]


if __name__ == "__main__":
    run_tests()

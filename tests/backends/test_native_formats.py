"""act_format="auto": the checkpoint's activation format where the chosen backend multiplies it natively."""

import pytest

from torch_moe_ops import Problem
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.native import MULTIPLIES, auto_act_format
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES

SIZES = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 256, "device": "cpu"}


def _fits_where_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a machine where everything of the backend is installed."""
    backend = BACKENDS[name]
    monkeypatch.setattr(type(backend), "reasons", lambda self, p: [] if self.fits_anywhere(p) else ["does not fit"])


@pytest.mark.parametrize(
    "scheme, act, chosen", [("nvfp4", "nvfp4", "none"), ("fp8", "fp8", "none"), ("mxfp4", "none", "none")]
)
def test_emulated_formats_become_weight_only(scheme: str, act: str, chosen: str) -> None:
    assert auto_act_format(Problem(scheme=scheme, act_format=act, **SIZES)) == chosen


def test_int8_is_multiplied_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fits_where_installed(monkeypatch, "cpu")
    problem = Problem(scheme="int8", act_format="int8", weight_scales="channel", **SIZES)
    assert auto_act_format(problem) == "int8"


def test_blackwell_multiplies_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    _fits_where_installed(monkeypatch, "flashinfer_cutlass")
    problem = Problem(
        scheme="nvfp4", act_format="nvfp4", input_scale="tensor", **{**SIZES, "device": "cuda"}, capability=(10, 0)
    )
    assert auto_act_format(problem) == "nvfp4"


def test_hopper_takes_nvfp4_as_weight_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _fits_where_installed(monkeypatch, "cuda_sm90")
    problem = Problem(scheme="nvfp4", act_format="nvfp4", **{**SIZES, "device": "cuda"}, capability=(9, 0))
    assert auto_act_format(problem) == "none"


def test_a_backend_that_has_nothing_else_keeps_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    _fits_where_installed(monkeypatch, "cuda_sm90_fp8")
    problem = Problem(scheme="fp8", act_format="fp8", **{**SIZES, "device": "cuda"}, capability=(9, 0))
    assert auto_act_format(problem, "cuda_sm90_fp8") == "fp8"
    assert auto_act_format(problem, "triton") == "none"


def test_the_table_names_backends_and_formats_that_there_are() -> None:
    assert set(MULTIPLIES) <= set(BACKENDS)
    accepted = {act for scheme in SCHEMES.values() for act in scheme.act_formats}
    for formats in MULTIPLIES.values():
        assert formats <= set(ACT_FORMATS) & accepted - {"none"}

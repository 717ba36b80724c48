"""A scheme or activation format that a table lacks is refused, by every backend and by the Triton engine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from paths import PROGRAMS

from torch_moe_ops.backends import BACKENDS


@pytest.fixture(scope="module")
def refused() -> Any:
    """What planted_scheme.py prints."""
    script = PROGRAMS / "planted_scheme.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_backend_has_a_reason(refused: Any) -> None:
    for what, against in refused["against"].items():
        assert against.keys() == BACKENDS.keys()
        name, act = what.split()
        for backend, reasons in against.items():
            assert reasons, f"{backend} advertises {what}"
            assert any(f"got {value!r}" in reason for reason in reasons for value in (name, act)), reasons


def test_prepare_refuses_it(refused: Any) -> None:
    assert refused["prepare"].pop("auto").startswith("ValueError: no backend can run this problem")
    for backend, error in refused["prepare"].items():
        assert error.startswith(f"ValueError: backend {backend!r} cannot run this problem"), error


def test_the_ops_refuse_every_backend_for_it(refused: Any) -> None:
    for backend, error in refused["op"].items():
        text = "moeq::mxfp6_moe_routed: backend must run mxfp6_e1m4 weights with act_format 'none'"
        assert error.startswith(f"RuntimeError: {text}") and f"got {backend!r}" in error, error


def test_the_triton_engine_raises(refused: Any) -> None:
    engine = refused["engine"]
    assert engine["weights"].startswith("RuntimeError: backend 'triton': scheme must be one of ['nvfp4', ")
    assert engine["weights"].endswith("got 'mxfp6_e1m4'")
    assert engine["hidden states"].startswith("RuntimeError: backend 'triton': act_format must be one of ['none', ")
    assert engine["tiles"] == "KeyError: 'mxfp6_e1m4'"
    assert engine["weights of int4"] is None, "a scheme that it knows"

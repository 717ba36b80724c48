"""What a process allows for float32 products elsewhere (TF32, bfloat16) changes no result, and no call touches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe

CASES = {
    "nvfp4": Case(act_format="nvfp4", input_scale="tensor", hidden=256, inter=128, tokens=9),
    "nvfp4 weight-only": Case(hidden=256, inter=128, tokens=9),
    "fp8_block": Case(scheme="fp8_block", act_format="fp8", hidden=256, inter=128, tokens=9),
    "int8": Case(scheme="int8", act_format="int8", hidden=256, inter=128, tokens=9),
    "none": Case(scheme="none", hidden=256, inter=128, tokens=9, dtype=torch.float16),
}


def _set(owner: Any, value: str) -> None:
    """Also after torch's testing utilities have frozen the flags."""
    with torch.backends.__allow_nonbracketed_mutation():
        owner.fp32_precision = value


def _attribute(owner: Any, value: str) -> Callable[[], None]:
    return lambda: _set(owner, value)


OWNERS = {
    "torch.backends": torch.backends,
    "torch.backends.cuda.matmul": torch.backends.cuda.matmul,
    "torch.backends.mkldnn": torch.backends.mkldnn,
    "torch.backends.mkldnn.matmul": torch.backends.mkldnn.matmul,
}
SETTINGS: dict[str, Callable[[], None]] = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    **{
        f"{name} {value}": _attribute(owner, value)
        for name, owner in OWNERS.items()
        for value in ("ieee", "tf32", *(("bf16",) if "mkldnn" in name else ()))
    },
}


def _now() -> dict[str, str]:
    """Read where nothing raises, also after the old and the new interface were mixed."""
    return {name: owner.fp32_precision for name, owner in OWNERS.items()}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = _now()
    yield
    torch.set_float32_matmul_precision("highest")
    for name, owner in OWNERS.items():
        _set(owner, before[name])
    assert torch.get_float32_matmul_precision() == "highest"


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
cases = pytest.mark.parametrize("name", CASES)


def layer(name: str, backend: str, device: str) -> Callable[[], torch.Tensor]:
    """A call of a layer, prepared now."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = CASES[name]
    w = moe.prepare(make_raw(case).to(device), act_format=case.act_format, backend=backend)
    x, ids, weights = make_batch(case, device)
    return lambda: moe.fused_moe_routed(x, ids, weights, w)


@devices
@cases
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_oracle_is_the_same_under_every_setting(setting: str, name: str, device: str) -> None:
    call = layer(name, "reference", device)
    plain = call()
    SETTINGS[setting]()
    before = _now()
    assert torch.equal(call(), plain)
    assert _now() == before


@cases
@pytest.mark.parametrize("setting", ["medium", "torch.backends.cuda.matmul tf32", "torch.backends.mkldnn.matmul bf16"])
def test_the_cpu_backend_is_the_same_too(setting: str, name: str) -> None:
    call = layer(name, "cpu", "cpu")
    plain = call()
    SETTINGS[setting]()
    assert torch.equal(call(), plain)


@cases
def test_nothing_is_set_while_it_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = layer(name, "reference", "cpu")
    torch.set_float32_matmul_precision("medium")

    def refused(*args: Any) -> None:
        raise AssertionError(f"set to {args}")

    for setter in ("_set_float32_matmul_precision", "_set_fp32_precision_setter", "_set_cublas_allow_tf32"):
        monkeypatch.setattr(torch._C, setter, refused)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", refused)
    call()


@cases
def test_products_are_made_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reduced precision is known for them, on any device."""
    dtypes: set[torch.dtype] = set()
    real = torch.Tensor.__matmul__

    def noted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        dtypes.update((self.dtype, other.dtype))
        return real(self, other)

    call = layer(name, "reference", "cpu")
    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    call()
    assert dtypes == {torch.float64}


@devices
def test_eight_threads_while_another_changes_every_setting(device: str) -> None:
    calls = [layer(name, "reference", device) for name in CASES]
    plain = [call() for call in calls]
    done = Event()

    def change() -> None:
        while not done.is_set():
            for setting in SETTINGS.values():
                setting()

    changer = Thread(target=change)
    changer.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda i: calls[i % len(calls)](), range(400)))
    finally:
        done.set()
        changer.join()
    assert all(torch.equal(result, plain[i % len(plain)]) for i, result in enumerate(results))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@cases
def test_the_default_dtype_changes_nothing(name: str, dtype: torch.dtype) -> None:
    call = layer(name, "reference", "cpu")
    plain, before = call(), torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        assert torch.equal(call(), plain)

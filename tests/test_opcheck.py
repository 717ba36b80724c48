"""Every overload of torch.ops.moeq passes torch.library.opcheck on its samples."""

from __future__ import annotations

import pytest
import torch
from samples import SAMPLES, overload

from torch_moe_ops._schemas import SCHEMAS


def test_every_overload_has_samples() -> None:
    registered = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("moeq::"):
            name = schema.name.removeprefix("moeq::")
            registered.add(f"{name}.{schema.overload_name}" if schema.overload_name else name)
    assert registered == set(SCHEMAS) == set(SAMPLES)


@pytest.fixture
def allclose_of_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares arguments before and after by torch.allclose, which lacks float8 on CPUs."""
    original = torch.allclose

    def allclose(a: torch.Tensor, b: torch.Tensor, *args: object, **keywords: object) -> bool:
        if a.dtype == torch.float8_e4m3fn:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return original(a, b, *args, **keywords)

    monkeypatch.setattr(torch, "allclose", allclose)


def _opcheck(name: str, device: str, some: bool) -> None:
    samples = SAMPLES[name](device)
    assert samples
    step = max(1, len(samples) // 4) if some else 1
    for args, keywords in samples[::step]:
        fresh = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
        torch.library.opcheck(overload(name), args, fresh)


names = pytest.mark.parametrize("name", sorted(SAMPLES))


@names
@pytest.mark.usefixtures("allclose_of_float8")
def test_opcheck(name: str) -> None:
    _opcheck(name, "cpu", some=True)


@names
@pytest.mark.slow
@pytest.mark.usefixtures("allclose_of_float8")
def test_opcheck_of_every_sample(name: str) -> None:
    _opcheck(name, "cpu", some=False)


@names
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("allclose_of_float8")
def test_opcheck_on_a_gpu(name: str) -> None:
    _opcheck(name, "cuda", some=True)


@pytest.mark.parametrize("name", sorted(n for n in SAMPLES if not n.endswith(".out")))
def test_nothing_differentiates_through_a_python_body(name: str) -> None:
    args, keywords = SAMPLES[name]("cpu")[0]
    args = tuple(a.clone().requires_grad_() if _differentiable(a) else a for a in args)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    outputs = overload(name)(*args, **keywords)
    for out in outputs if isinstance(outputs, tuple) else (outputs,):
        if out.grad_fn is not None:
            # Not MulBackward0 or the like: the node says that no autograd kernel exists.
            assert "NotImplemented" in out.grad_fn.name(), out.grad_fn.name()
            torch.autograd.backward(out, torch.ones_like(out), retain_graph=True)
    assert all(leaf.grad is None for leaf in leaves)


def _differentiable(a: object) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point()

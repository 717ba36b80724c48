"""Every overload of torch.ops.moeq passes torch.library.opcheck on its samples, their e4m3 codes given as bytes.

opcheck compares arguments before and after by torch.allclose, which lacks float8 on CPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import SAMPLES, Sample, as_bytes, overload, results_of

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemas import SCHEMAS, arguments
from torch_moe_ops.core.schemes import SCHEMES


def test_every_overload_has_samples() -> None:
    registered = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("moeq::"):
            name = schema.name.removeprefix("moeq::")
            registered.add(f"{name}.{schema.overload_name}" if schema.overload_name else name)
    assert registered == set(SCHEMAS) == set(SAMPLES)


def _some(samples: list[Sample]) -> list[Sample]:
    """Three of them; the slow tests take them all."""
    return samples[:: -(-len(samples) // 3)]


def _opcheck(name: str, samples: list[Sample]) -> None:
    assert samples
    for args, keywords in samples:
        fresh = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
        torch.library.opcheck(overload(name), tuple(as_bytes(a) for a in args), fresh)
        leaves = _differentiated(name, args)
        if leaves is not None:
            torch.library.opcheck(
                overload(name),
                leaves,
                fresh,
                test_utils=UTILS[: 3 if name.startswith("route") or name == "moe_hidden" else 4],
            )


def _differentiated(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments, those that have a gradient as leaves that require one; None for an op without a derivative."""
    names, found = arguments(name)[0], [as_bytes(a) for a in args]
    if not name.endswith(("moe", "moe_routed", "moe_routed_lora", "route", "_hidden", "grouped_linear")):
        return None
    for i, (argument, value) in enumerate(zip(names, found, strict=False)):
        if argument in DIFFERENTIABLE and isinstance(value, torch.Tensor) and value.is_floating_point():
            found[i] = value.clone().requires_grad_()
    return tuple(found)


# The last one adds the results up, integers first, which torch refuses for routers: test_training.py compiles them.
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
DIFFERENTIABLE = (
    "x",
    "hidden_states",
    "router_weight",
    "router_bias",
    "topk_weights",
    "router_logits",
    "w13_bias",
    "w2_bias",
)
DIFFERENTIABLE += ("lora_a13", "lora_b13", "lora_a2", "lora_b2")


names = pytest.mark.parametrize("name", sorted(SAMPLES))


@names
def test_opcheck(name: str) -> None:
    _opcheck(name, _some(SAMPLES[name]("cpu")))


ON_THIS_CPU = [b for b in BACKENDS if any(not moe.explain(moe.Problem(s, "none")).against[b] for s in SCHEMES)]
OF_BACKENDS = [
    (backend, name)
    for backend in (*ON_THIS_CPU, "none")
    for name in sorted(SAMPLES)
    if ("backend" in arguments(name)[0]) == (backend != "none")
]


@pytest.mark.parametrize(("backend", "name"), OF_BACKENDS)
@pytest.mark.slow
def test_opcheck_of_every_sample(backend: str, name: str) -> None:
    """By backend, so that `-k` can take those of a new one; "none": of an op that names no backend."""
    samples = SAMPLES[name]("cpu")
    if backend != "none":
        place = arguments(name)[0].index("backend")
        samples = [(args, keywords) for args, keywords in samples if args[place] == backend]
        if not samples:
            pytest.skip(f"no sample of {name} is for backend {backend}")
    _opcheck(name, samples)


@names
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_opcheck_on_a_gpu(name: str) -> None:
    _opcheck(name, _some(SAMPLES[name]("cuda")))


HAVE_E4M3 = ("nvfp4_moe", "fp8_moe", "fp8_block_moe", "mxfp8_moe", "mxfp4_moe_routed", "int4_moe_routed")


@names
def test_bytes_give_the_result_of_float8(name: str) -> None:
    found = 0
    for args, keywords in SAMPLES[name]("cpu"):
        given = tuple(as_bytes(a) for a in args)
        if name.endswith(("swizzle_scale", "ep_dispatch")) or all(a is b for a, b in zip(args, given, strict=True)):
            continue
        found += 1
        assert results_of(name, args, keywords) == results_of(name, given, keywords)
    assert found or not name.startswith(HAVE_E4M3)

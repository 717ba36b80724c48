"""Imports the library with a scheme and an activation format that no backend was written for, and asks each for it.

A process of its own: tables are made when the library is imported. Prints what was refused, as JSON.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from typing import Any

import torch


class _Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs torch_moe_ops.core.schemes as it is, then adds to its tables."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch_moe_ops.core.schemes":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None and found.loader is not None
        self.real = found.loader
        found.loader = self
        return found

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        tables: Any = module
        like = tables.SCHEMES["mxfp6_e3m2"]
        acts = (*like.act_formats, "tf4")
        # In the family of mxfp6, whose ops take an element.
        tables.SCHEMES["mxfp6_e1m4"] = dataclasses.replace(like, name="mxfp6_e1m4", element="e1m4", act_formats=acts)
        tables.SCHEMES["int4"] = dataclasses.replace(
            tables.SCHEMES["int4"], act_formats=(*tables.SCHEMES["int4"].act_formats, "tf4")
        )
        tables.ACT_FORMATS["tf4"] = dataclasses.replace(tables.ACT_FORMATS["mxfp4"], name="tf4")


sys.meta_path.insert(0, _Planter())

import torch_moe_ops as moe  # noqa: E402
from torch_moe_ops.backends import BACKENDS  # noqa: E402
from torch_moe_ops.backends.triton_engine import configs, formats  # noqa: E402
from torch_moe_ops.core.call import ExpertsCall  # noqa: E402
from torch_moe_ops.core.schemes import SCHEMES  # noqa: E402

NEW = (("mxfp6_e1m4", "none"), ("mxfp6_e1m4", "tf4"), ("int4", "tf4"))


def _against(scheme: str, act_format: str) -> dict[str, list[str]]:
    """What backends say of it, requirements of the device aside."""
    problem = moe.Problem(scheme, act_format, num_experts=2, hidden_size=256, intermediate_size=256)
    return {name: [w for r in b.requires if r.of_format and (w := r.unmet(problem))] for name, b in BACKENDS.items()}


def _raised(function: Any, *args: Any, **kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _call(scheme: str, act_format: str) -> ExpertsCall:
    values: dict[str, Any] = dict.fromkeys(ExpertsCall._fields)
    weight = torch.zeros((2, 64, 32), dtype=SCHEMES[scheme].weight_dtypes[0])
    values |= {"scheme": scheme, "act_format": act_format, "backend": "triton", "hidden_states": torch.zeros(3, 32)}
    values |= {"w13": weight, "w2": weight, "w13_scale": torch.ones(2, 64, 1), "w2_scale": torch.ones(2, 64, 1)}
    return ExpertsCall(**values)


def _prepared() -> moe.RawWeights:
    w13, w2 = torch.zeros(2, 64, 32, dtype=torch.uint8), torch.zeros(2, 32, 32, dtype=torch.uint8)
    scales = [torch.full((2, w.shape[1], 1), 127, dtype=torch.uint8) for w in (w13, w2)]
    return moe.RawWeights("mxfp6_e1m4", w13, w2, *scales)


def _op(backend: str) -> None:
    raw = _prepared()
    x, ids = torch.zeros(3, 32), torch.zeros(3, 1, dtype=torch.int32)
    torch.ops.moeq.mxfp6_moe_routed(
        x, None, ids, torch.ones(3, 1), raw.w13, raw.w13_scale, None, raw.w2, raw.w2_scale, None, backend, "none",
        element="e1m4",
    )  # fmt: skip


print(
    json.dumps(
        {
            "against": {f"{scheme} {act}": _against(scheme, act) for scheme, act in NEW},
            "prepare": {
                name: _raised(moe.prepare, _prepared(), act_format="none", backend=name) for name in ("auto", *BACKENDS)
            },
            "op": {name: _raised(_op, name) for name in BACKENDS},
            "engine": {
                "weights": _raised(formats.weight_format, _call("mxfp6_e1m4", "none"), 1, False),
                "hidden states": _raised(formats.operand_format, _call("int4", "tf4"), 1, formats.WeightFormat("int4")),
                "tiles": _raised(configs.rules, "mxfp6_e1m4", 64, 2, 8, 256, 256),
                "weights of int4": _raised(formats.weight_format, _call("int4", "none"), 1, False),
            },
        }
    )
)

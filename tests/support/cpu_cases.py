"""Layers of every scheme and activation format, for the C++ kernels."""

from __future__ import annotations

import torch
from cpu_problems import Problem, nvfp4

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

CASES: dict[str, dict[str, object]] = {
    "nvfp4-fp8": {"scheme": "nvfp4", "act_format": "fp8"},
    "mxfp4-none": {"scheme": "mxfp4", "act_format": "none"},
    "mxfp4-mxfp8": {"scheme": "mxfp4", "act_format": "mxfp8"},
    "mxfp4-fp8": {"scheme": "mxfp4", "act_format": "fp8"},
    "mxfp4-mxfp4": {"scheme": "mxfp4", "act_format": "mxfp4"},
    "mxfp4-e3m2": {"scheme": "mxfp4", "act_format": "mxfp6_e3m2"},
    "mxfp4-e2m3": {"scheme": "mxfp4", "act_format": "mxfp6_e2m3"},
    "mxfp8-none": {"scheme": "mxfp8", "act_format": "none"},
    "mxfp8-mxfp8": {"scheme": "mxfp8", "act_format": "mxfp8"},
    "mxfp6-e3m2": {"scheme": "mxfp6", "act_format": "mxfp6_e3m2", "element": "e3m2"},
    "mxfp6-e2m3": {"scheme": "mxfp6", "act_format": "mxfp6_e2m3", "element": "e2m3"},
    "mxint4-none": {"scheme": "mxint4", "act_format": "none", "group": 32},
    "int4-g32": {"scheme": "int4", "act_format": "none", "group": 32},
    "int4-g64-f16": {"scheme": "int4", "act_format": "none", "group": 64, "scale_dtype": F16},
    "int4-row-f32": {"scheme": "int4", "act_format": "none", "scale_dtype": F32},
    "int4-zero": {"scheme": "int4", "act_format": "none", "group": 32, "zero_points": True, "scale_dtype": F16},
    "int4-zero-row": {"scheme": "int4", "act_format": "none", "zero_points": True},
    "int4-fp8": {"scheme": "int4", "act_format": "fp8", "group": 64},
    "int4-int8": {"scheme": "int4", "act_format": "int8", "group": 32},
    "int4-int8-g64-f16": {"scheme": "int4", "act_format": "int8", "group": 64, "scale_dtype": F16},
    "int4-int8-row-f32": {"scheme": "int4", "act_format": "int8", "scale_dtype": F32},
    "int4-int8-zero": {"scheme": "int4", "act_format": "int8", "group": 32, "zero_points": True},
    "int4-int8-zero-row": {"scheme": "int4", "act_format": "int8", "zero_points": True, "scale_dtype": F32},
    "mxint4-int8": {"scheme": "mxint4", "act_format": "int8", "group": 32},
    "fp8-none": {"scheme": "fp8", "act_format": "none"},
    "fp8-fp8": {"scheme": "fp8", "act_format": "fp8"},
    "fp8-unscaled": {"scheme": "fp8", "act_format": "fp8", "channel": False},
    "fp8-static": {"scheme": "fp8", "act_format": "fp8", "channel": False, "a1_gscale": 20.0, "a2_gscale": 9.0},
    "fp8_block-none": {"scheme": "fp8_block", "act_format": "none"},
    "fp8_block-fp8": {"scheme": "fp8_block", "act_format": "fp8", "act_group": 128},
    "int8-none": {"scheme": "int8", "act_format": "none", "scale_dtype": F32},
    "int8-int8": {"scheme": "int8", "act_format": "int8", "scale_dtype": F32},
    "int8-int8-bf16": {"scheme": "int8", "act_format": "int8"},
    "int8-static": {"scheme": "int8", "act_format": "int8", "a1_gscale": 30.0, "a2_gscale": 11.0},
    "int8-group": {"scheme": "int8", "act_format": "int8", "group": 64, "scale_dtype": F32},
    "int8-zero": {"scheme": "int8", "act_format": "int8", "group": 64, "zero_points": True},
    "int8-zero-row": {"scheme": "int8", "act_format": "int8", "zero_points": True, "scale_dtype": F16},
    "int8-zero-none": {"scheme": "int8", "act_format": "none", "zero_points": True, "scale_dtype": F32},
}


def build(case: str, hidden: int, inter: int, **fields: object) -> Problem:
    arguments = {**CASES[case], **fields}
    scheme = str(arguments.pop("scheme"))
    for name in ("a1_gscale", "a2_gscale"):
        if name in arguments:
            arguments[name] = torch.tensor(arguments[name])
    problem = Problem(scheme, 4, hidden, inter, **arguments)
    problem.layer.g1_alphas = problem.alphas(2)
    problem.layer.g2_alphas = problem.alphas()
    if scheme == "none":
        problem.layer.g1_alphas = problem.layer.g2_alphas = None
    return problem


def any_case(case: str, hidden: int, inter: int, **fields: object) -> Problem:
    """The same, and "none-bf16", "nvfp4-none" and "nvfp4-nvfp4" besides."""
    if case == "none-bf16":
        return Problem("none", 4, hidden, inter, weight_dtype=BF16, **fields)
    if case in ("nvfp4-none", "nvfp4-nvfp4"):
        return nvfp4(hidden, inter, experts=4, act_format=case.removeprefix("nvfp4-"), **fields)
    return build(case, hidden, inter, **fields)

"""experts_implementation="moeq": the name under which transformers finds the library's experts."""

from __future__ import annotations

import contextlib

from torch_moe_ops.transformers.counting import intercept_counting
from torch_moe_ops.transformers.experts import IMPLEMENTATION, moeq_experts
from torch_moe_ops.transformers.saving import intercept_saving


def register_implementation() -> None:
    """Make experts_implementation="moeq" known, and models that hold its experts ones that are counted and saved."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(f"the experts interface of transformers 5 is needed: {error}") from error
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, moeq_experts)
    # Where transformers keeps FP8 experts packed itself (on a GPU), their modules have an interface of their own.
    with contextlib.suppress(ImportError):
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

        ALL_FP8_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, moeq_experts)
    intercept_saving()
    intercept_counting()

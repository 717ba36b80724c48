"""What a user sets: vLLM hands a plug-in no arguments, so these are environment variables."""

from __future__ import annotations

import os

from torch_moe_ops.core.problem import ACCURACIES

SWITCH = "MOEQ_VLLM"
ACT_FORMAT = "MOEQ_VLLM_ACT_FORMAT"
ACCURACY = "MOEQ_VLLM_ACCURACY"
ALL2ALL = "MOEQ_VLLM_ALL2ALL"
SHARED_EXPERTS = "MOEQ_VLLM_SHARED_EXPERTS"
_ON, _OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
# vLLM's names of ways to exchange tokens, by which of them our tests ran.
_TESTED = ("allgather_reducescatter",)
_UNTESTED = ("deepep_high_throughput", "deepep_low_latency")
_ACT_FORMATS = ("auto", "checkpoint", "none")


def switch() -> bool | None:
    """MOEQ_VLLM: True or False where it is set, None where it is not.

    Raises ValueError for any other word.
    """
    word = os.environ.get(SWITCH, "").strip().lower()
    if word not in ("", *_ON, *_OFF):
        raise ValueError(f"{SWITCH} must be one of {[*_ON, *_OFF]}, got {word!r}")
    return None if not word else word in _ON


def act_format() -> str:
    """MOEQ_VLLM_ACT_FORMAT: "auto", "checkpoint" or "none".

    "auto": the checkpoint's activation format where a backend multiplies it natively, else weight-only.
    """
    return _word(ACT_FORMAT, _ACT_FORMATS)


def accuracy() -> str:
    """MOEQ_VLLM_ACCURACY: "standard" (the default) or "strict", as in `prepare`."""
    return _word(ACCURACY, ACCURACIES)


def shared_experts() -> str:
    """MOEQ_VLLM_SHARED_EXPERTS: "inside" the call of the routed ones, where they can join it (default), or "beside"."""
    return _word(SHARED_EXPERTS, ("inside", "beside"))


def all2all_backends() -> tuple[str, ...]:
    """Those under which layers are taken over. MOEQ_VLLM_ALL2ALL: "tested" (the default) or "any"."""
    return _TESTED if _word(ALL2ALL, ("tested", "any")) == "tested" else _TESTED + _UNTESTED


def _word(variable: str, allowed: tuple[str, ...]) -> str:
    """What a variable says, the first one where it is not set. Raises ValueError for any other word."""
    word = os.environ.get(variable, "").strip().lower() or allowed[0]
    if word not in allowed:
        raise ValueError(f"{variable} must be one of {list(allowed)}, got {word!r}")
    return word

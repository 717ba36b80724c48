"""What a user sets: vLLM hands a plug-in no arguments, so these are environment variables."""

from __future__ import annotations

import os

SWITCH = "MOEQ_VLLM"
ACT_FORMAT = "MOEQ_VLLM_ACT_FORMAT"
_ON, _OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
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
    word = os.environ.get(ACT_FORMAT, "").strip().lower() or "auto"
    if word not in _ACT_FORMATS:
        raise ValueError(f"{ACT_FORMAT} must be one of {list(_ACT_FORMATS)}, got {word!r}")
    return word

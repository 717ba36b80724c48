"""Lines in vLLM's log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

# A child of vLLM's logger, which has the handlers.
logger = logging.getLogger("vllm.torch_moe_ops")
_said: set[tuple[Any, ...]] = set()


def say_once(say: Callable[..., None], text: str, *args: Any) -> None:
    """Log a line, once in a process for the same arguments but the last one, a layer's name."""
    if (text, *args[:-1]) not in _said:
        _said.add((text, *args[:-1]))
        say(text, *args)

"""Tensors of [batch, sequence, ...] that a layer takes as rows must have their tokens in the same places."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_moe_ops.core.check import fail


def check_tokens(who: str, tokens: Any, like: str = "hidden_states", **given: Any) -> None:
    """RuntimeError where a tensor has as many tokens in other dimensions ([sequence, batch], say): as rows, each would
    meet another one's. One that is rows already is the op's to check; dimensions of one token do not count."""
    if not isinstance(tokens, Tensor) or tokens.ndim < 3:
        return
    for name, t in given.items():
        if isinstance(t, Tensor) and t.ndim > 2 and not _same(t.shape[:-1], tokens.shape[:-1]):
            # Numbers by themselves: Dynamo traces this, and makes no text of a shape.
            wanted = ", ".join(f"{size}" for size in (*tokens.shape[:-1], t.shape[-1]))
            fail(who, name, f"have shape ({wanted}) like {like}", t.shape)


def check_owners(who: str, tokens: Any, lora_ids: Any) -> None:
    """check_tokens of adapters' ids, which have no last dimension."""
    if isinstance(lora_ids, Tensor) and lora_ids.ndim > 1:
        check_tokens(who, tokens, lora_ids=lora_ids[..., None])


def _same(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return shape == other or [size for size in shape if size != 1] == [size for size in other if size != 1]

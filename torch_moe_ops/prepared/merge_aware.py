"""MergeAware: prepared weights that are always what merging an adapter would make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_moe_ops.prepared.lora import Lora
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.restoring import restore
from torch_moe_ops.weights.merge_lora import merge_lora
from torch_moe_ops.weights.raw_weights import RawWeights


class MergeAware:
    """Keeps prepared weights at Q(W + scaling * B @ A) while A and B learn; Q: the quantizer of `merge_lora`.

    Then what is trained is what a merged checkpoint computes, bit for bit:

        merge_aware = moe.MergeAware(w)
        for batch in batches:
            merge_aware.update(lora)
            y = moe.fused_moe_routed(x, ids, weights, w, lora=lora, lora_merged=True)
            ...

    Args:
        w: what is kept so, in place: its addresses do not change. Its values now are the W of every merge.

    Memory: a second time the packed weights. Time: `update` decodes and quantizes every expert that changed.
    """

    def __init__(self, w: PreparedWeights) -> None:
        _count_steps()
        self.w, self.origin = w, w
        self._base: RawWeights | None = restore(w)
        self._seen: list[_Version] | None = []

    @classmethod
    def beside(cls, base: PreparedWeights) -> MergeAware:
        """In tensors of its own, `w`: `base` stays as it is, and its values are the W of every merge.

        So the layer can run without its adapter while backward passes with it are yet to come.
        """
        _count_steps()
        made = cls.__new__(cls)
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in base.tensors().items()}
        made.w = dataclasses.replace(base, **copies)
        made._base, made.origin = None, base
        made._seen = made._versions_of_base()
        return made

    @property
    def base(self) -> RawWeights:
        """The W of every merge."""
        return restore(self.origin) if self._base is None else self._base

    @torch.no_grad()
    def update(self, *adapters: Lora, sources: Sequence[Tensor] = ()) -> bool:
        """Merge these adapters into the base, each in its turn; without any, take the base back.

        Nothing happens, and the result is False, where neither a factor nor `base` of `beside` was written to since the
        last call, and no optimizer made a step. sources: what the factors are made of anew for each call, which then
        tells. What writes to `.data` of a factor outside an optimizer is not seen.

        Raises: ValueError for a stack of several adapters, and of `merge_lora`.
        """
        now = self._versions_of_base()
        now += [version for adapter in adapters for version in _versions(adapter, sources)]
        if self._seen is not None and _same(now, self._seen):
            return False
        raw, self._seen = self.base, None  # until all of it is done
        for adapter in adapters:
            named = {name: getattr(adapter, name) for name in ("a13", "b13", "a2", "b2")}
            found = {name: t.detach().to(raw.device) for name, t in named.items() if t is not None}
            raw = merge_lora(raw, **found, scaling=_scaling(adapter))
        self.w.update_(raw)
        self._seen = now
        return True

    def _versions_of_base(self) -> list[_Version]:
        """Of what `beside` left as it is, which others may load into; an inference tensor has no version."""
        if self._base is not None:
            return []
        return [(t, 0 if t.is_inference() else t._version, 0, 1.0) for t in self.origin.tensors().values()]


_Version = tuple[Tensor, int, int, float]
_steps: list[int] = []  # how many steps the optimizers of this process have made, once somebody asks


def _count_steps() -> None:
    """Optimizers with kernels of their own write past the versions of tensors, so that every step counts."""
    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(_count_step)


def _count_step(*_: object) -> None:
    _steps[0] += 1


def _versions(adapter: Lora, sources: Sequence[Tensor]) -> list[_Version]:
    """The factors, which stay alive so that no other tensor gets their addresses, and how often each was written to."""
    scaling = _scaling(adapter)
    factors = sources or (adapter.a13, adapter.b13, adapter.a2, adapter.b2)
    return [(t.detach(), t._version, _steps[0], scaling) for t in factors if t is not None]


def _same(now: list[_Version], seen: list[_Version]) -> bool:
    return len(now) == len(seen) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and rest == before
        for (a, *rest), (b, *before) in zip(now, seen, strict=True)
    )


def _scaling(adapter: Lora) -> float:
    scaling = adapter.scaling
    if not isinstance(scaling, Tensor):
        return scaling
    if scaling.numel() != 1:
        raise ValueError(f"MergeAware: lora must be a single adapter, got {scaling.numel()}")
    return scaling.item()

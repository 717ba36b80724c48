"""Layouts of whole layers for FlashInfer's kernels: shapes, prepare, restore.

One `WeightRules` per scheme says everything; both backends are tables of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import matrices
from torch_moe_ops.backends.flashinfer.matrices import BLOCK_BYTES, MatrixLayout
from torch_moe_ops.backends.flashinfer.rows import row_order
from torch_moe_ops.core.layout import BiasLayout, Layout, Sizes, Spec
from torch_moe_ops.core.schemes import SCHEMES, Scheme
from torch_moe_ops.weights.raw_weights import RawWeights


@dataclass(frozen=True)
class WeightRules:
    """What a kernel reads of one scheme.

    hidden_multiple, inter_multiple: both sizes are padded up to these, the halves of w13 each on its own.
    """

    matrix: MatrixLayout
    hidden_multiple: int
    inter_multiple: int

    def padded(self, hidden: int, inter: int) -> tuple[int, int]:
        """hidden and intermediate size in the layout."""
        return _up(hidden, self.hidden_multiple), _up(inter, self.inter_multiple)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class LayerLayout:
    """prepare, restore and shapes of one backend's layers.

    rules: by scheme. bias_multiple: w2's bias is padded to it, w13's as the rows of w13 are.
    """

    def __init__(self, name: str, rules: Mapping[str, WeightRules], bias_multiple: int) -> None:
        self.rules, self._bias_multiple = rules, bias_multiple
        self.layout = Layout(name, self.specs, self.intermediate_size)
        self.biases = BiasLayout(self._arrange_bias, self._undo_bias)

    def specs(self, scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
        """Shapes and dtypes of weights, scales and biases. intermediate_size of `sizes` is the padded one."""
        rules = self._rules(scheme.name)
        hidden, inter = rules.padded(sizes.hidden_size, sizes.intermediate_size)
        halves = 2 if sizes.is_gated else 1
        table: dict[str, Spec] = {}
        for name, rows, k, parts in (("w13", halves * inter, hidden, halves), ("w2", hidden, inter, 1)):
            table[name] = ((self._weight_shape(scheme, sizes, rows, k),), (sizes.weight_dtype,))
            if scheme.scales is not None:
                shapes = scheme.scales.shapes(rows, k, parts)
                table[f"{name}_scale"] = tuple((sizes.num_experts, *s) for s in shapes), scheme.scales.dtypes
            biases = rows if name == "w13" else _up(sizes.hidden_size, self._bias_multiple)
            table[f"{name}_bias"] = ((sizes.num_experts, biases),), (torch.float32,)
        return table

    def _rules(self, scheme: str) -> WeightRules:
        # Schemes of which the backend has no kernel get plain rules, so that its op says what is wrong.
        return self.rules.get(scheme, WeightRules(MatrixLayout(), 1, 1))

    def _weight_shape(self, scheme: Scheme, sizes: Sizes, rows: int, k: int) -> tuple[int, ...]:
        storage = scheme.storage_k(k)
        if not self._rules(scheme.name).matrix.blocked:
            return sizes.num_experts, rows, storage
        block = BLOCK_BYTES // sizes.weight_dtype.itemsize
        return sizes.num_experts, storage // block, rows, block

    def intermediate_size(self, scheme: Scheme, w2_shape: tuple[int, ...]) -> int:
        """From the shape of w2, padding included."""
        blocked = self._rules(scheme.name).matrix.blocked
        return scheme.logical_k(w2_shape[1] * w2_shape[-1] if blocked else w2_shape[2])

    def prepare(self, raw: RawWeights) -> dict[str, Tensor]:
        """Weights and scales of a layer, on raw's device."""
        scheme, rules = get_rules(self.rules, raw.scheme)
        hidden, inter = rules.padded(raw.hidden_size, raw.intermediate_size)
        sizes = Sizes(raw.num_experts, raw.hidden_size, inter, raw.is_gated, raw.w13.dtype)
        specs = self.specs(scheme, sizes)
        tensors: dict[str, Tensor] = {}
        for name, gated in (("w13", raw.is_gated), ("w2", False)):
            rows = hidden if name == "w2" else inter * (2 if gated else 1)
            order = row_order(rows, gated, rules.matrix.interleave, rules.matrix.shuffle).to(raw.device)
            weight, halves = getattr(raw, name), 2 if gated else 1
            (shape,), (dtype,) = specs[name]
            tensors[name] = torch.empty(shape, dtype=dtype, device=raw.device)
            matrices.arrange_weights(_bytes(weight), _bytes(tensors[name]), rules.matrix, order, halves)
            scale = getattr(raw, f"{name}_scale")
            if scale is not None:
                tensors[f"{name}_scale"] = _arrange_scale(scheme, scale, specs[f"{name}_scale"], order, halves)
        return tensors

    def restore(self, scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """Inverse of prepare, bit for bit. sizes: the logical ones."""
        rules = self.rules[scheme.name]
        hidden, inter = rules.padded(sizes.hidden_size, sizes.intermediate_size)
        restored: dict[str, Tensor] = {}
        for name, gated in (("w13", sizes.is_gated), ("w2", False)):
            if name not in tensors:
                continue
            halves = 2 if gated else 1
            n, k = (halves * sizes.intermediate_size, sizes.hidden_size)
            n, k = (n, k) if name == "w13" else (k, sizes.intermediate_size)
            rows = hidden if name == "w2" else halves * inter
            stored = tensors[name]
            order = row_order(rows, gated, rules.matrix.interleave, rules.matrix.shuffle).to(stored.device)
            shape = (sizes.num_experts, n, scheme.storage_k(k))
            restored[name] = torch.empty(shape, dtype=stored.dtype, device=stored.device)
            matrices.restore_weights(_bytes(stored), _bytes(restored[name]), rules.matrix, order, halves)
            if scheme.scales is not None:
                scale = tensors[f"{name}_scale"]
                restored[f"{name}_scale"] = _restore_scale(scheme, scale, n, k, order, halves)
        return restored

    def _arrange_bias(self, name: str, bias: Tensor, halves: int) -> Tensor:
        rows = _up(bias.shape[1], self._bias_multiple) if name == "w2_bias" else bias.shape[1]
        order = self._bias_order(rows, halves).to(bias.device)
        return torch.nn.functional.pad(bias, (0, rows - bias.shape[1]))[:, order]

    def _undo_bias(self, name: str, bias: Tensor, halves: int) -> Tensor:
        return bias[:, torch.argsort(self._bias_order(bias.shape[1], halves).to(bias.device))]

    def _bias_order(self, rows: int, halves: int) -> Tensor:
        matrix = next(iter(self.rules.values())).matrix  # the same for all schemes that take biases
        return row_order(rows, halves == 2, matrix.interleave, matrix.shuffle)


def get_rules(rules: Mapping[str, WeightRules], scheme: str) -> tuple[Scheme, WeightRules]:
    """Scheme and rules by name; KeyError where the backend has no kernel for it (its requirements say so before)."""
    return SCHEMES[scheme], rules[scheme]


def _bytes(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.uint8)


def _arrange_scale(scheme: Scheme, scale: Tensor, spec: Spec, order: Tensor, halves: int) -> Tensor:
    kind: Any = scheme.scales.kind if scheme.scales else ""
    if kind == "channel":
        return _arrange_rows(scale, order, halves) if scale.ndim == 3 else scale.contiguous()
    shape, dtype = spec[0][0], spec[1][0]
    if kind == "tile":
        padded = [matrices.pad_matrix(one, halves, *shape[1:]) for one in scale]
        return torch.stack([p.roll(p.shape[0] // 2, 0) if halves == 2 else p for p in padded])
    out = torch.empty(shape, dtype=dtype, device=scale.device)
    matrices.arrange_scales(scale, out, order, halves)
    return out


def _arrange_rows(scale: Tensor, order: Tensor, halves: int) -> Tensor:
    """One scale a row: [E, rows, 1], padded and moved as the rows are."""
    padded = [matrices.pad_matrix(one, halves, order.numel(), 1) for one in scale]
    return torch.stack([one.index_select(0, order) for one in padded])


def _restore_scale(scheme: Scheme, stored: Tensor, n: int, k: int, order: Tensor, halves: int) -> Tensor:
    assert scheme.scales is not None
    if scheme.scales.kind == "channel":
        if stored.ndim == 2:
            return stored.clone()
        back = [one.index_select(0, torch.argsort(order)) for one in stored]
        return torch.stack([matrices.cut_matrix(one, halves, n, 1) for one in back])
    shape = scheme.scales.shapes(n, k, halves)[0]
    if scheme.scales.kind == "tile":
        back = [one.roll(one.shape[0] // 2, 0) if halves == 2 else one for one in stored]
        return torch.stack([matrices.cut_matrix(one, halves, *shape) for one in back])
    out = torch.empty((stored.shape[0], *shape), dtype=stored.dtype, device=stored.device)
    matrices.restore_scales(stored, out, order, halves)
    return out

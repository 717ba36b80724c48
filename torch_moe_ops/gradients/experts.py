"""The gradient of a routed layer, from its inputs alone: what the forward pass made in between is made again.

Of a pair of token t and expert e with weight w, whose output is w * y (oracle/reference.py), and G = grad[t]:

    z = W13 A1(x[t]) + b13,   h = act(z),   u = W2' G
    dw = <A2(h), u> + <b2, G>,   dz = act'(z) w u,   dx = W13' dz,   db13 = dz,   db2 = w G

A1 and A2 round as the forward pass does, and pass gradients through as if they did not (straight-through). Sums over
the pairs of a token are in float32, slots ascending, and those over the tokens of an expert ascend too: a result does
not change from run to run. Weights are decoded a few experts at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core.activations import apply_activation
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients.activations import activation_gradients
from torch_moe_ops.gradients.pairs import PIECE_ELEMENTS, Piece, pieces, sort_pairs
from torch_moe_ops.gradients.products import grouped_product, product_dtype
from torch_moe_ops.gradients.weights import decode_experts, experts_at_once
from torch_moe_ops.oracle.operands import packed_operand, quantized_operand


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    hidden_states: bool
    topk_weights: bool
    w13_bias: bool
    w2_bias: bool


class Gradients(NamedTuple):
    """Gradients of the arguments of these names, like them in shape; None where not wanted.

    hidden_states: float32 or wider. topk_weights and biases: float32 (float64 where hidden_states are).
    """

    hidden_states: Tensor | None
    topk_weights: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None


def experts_gradients(call: ExpertsCall, backend: Backend, sizes: Sizes, grad: Tensor, wanted: Wanted) -> Gradients:
    """Gradients of a routed layer.

    Args:
        call: checked and complete, tensors contiguous. Hidden states that came packed have no gradient.
        sizes: of the layer, the intermediate size as the layout pads it.
        grad: [num_tokens, hidden_size], any float dtype.
    """
    if backend.run_backward is not None:
        found: Gradients | None = backend.run_backward(call, sizes, grad, wanted)
        if found is not None:
            return found
    return _Backward(call, backend, sizes, grad, wanted).run()


class _Backward:
    """One backward pass: what all of its pieces share."""

    def __init__(self, call: ExpertsCall, backend: Backend, sizes: Sizes, grad: Tensor, wanted: Wanted) -> None:
        self.call, self.backend, self.sizes, self.grad, self.wanted = call, backend, sizes, grad, wanted
        self.dtype = product_dtype(call.hidden_states)
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.halves = 2 if sizes.is_gated else 1
        self.top_k = call.topk_ids.shape[1]
        self.on_input = call.router_weight_on_input
        self.x = self._weighed_input() if self.on_input else call.hidden_states
        self.biases = self._biases()
        self.pairs = sort_pairs(call.topk_ids, call.local_expert_offset, sizes.num_experts)
        places = self.pairs.order.shape[0]
        local = places if self.pairs.host_ends is None else self.pairs.host_ends[-1]
        self.of_inputs = wanted.hidden_states or (self.on_input and wanted.topk_weights)
        self.dx = grad.new_empty((local if self.of_inputs else 0, sizes.hidden_size), dtype=self.dtype)
        self.dw = grad.new_zeros(places, dtype=self.wide)
        self.db13, self.db2 = (
            grad.new_zeros((sizes.num_experts, n), dtype=self.wide) if asked else None
            for n, asked in (
                (self.halves * sizes.intermediate_size, wanted.w13_bias),
                (sizes.hidden_size, wanted.w2_bias),
            )
        )

    def run(self) -> Gradients:
        count = self.sizes.num_experts
        step = experts_at_once(self.call, self.backend, self.sizes, self.dtype)
        widest = max(self.halves * self.sizes.intermediate_size, self.sizes.hidden_size)
        for first in range(0, count, step):
            last, w13 = min(first + step, count), None
            for piece in pieces(self.pairs, first, last, max(1, PIECE_ELEMENTS // widest)):
                if w13 is None:  # not for experts that nobody visits
                    chosen = slice(first, last)
                    w13, w2 = decode_experts(self.call, self.backend, self.sizes, chosen, self.dtype)
                self._add(piece, first, w13, w2)
        return self._gradients()

    def _add(self, piece: Piece, first: int, w13: Tensor, w2: Tensor) -> None:
        call, expert, places = self.call, piece.expert + first, piece.places
        order = self.pairs.order[places]
        token = order // self.top_k
        z = grouped_product(self._hidden(token, expert), w13, piece, transposed=True).to(self.wide)
        grad = self.grad[token].to(self.dtype)
        u = grouped_product(grad, w2, piece, transposed=False).to(self.wide)
        if piece.valid is not None:
            z, u, grad = (torch.where(piece.valid[:, None], t, 0.0) for t in (z, u, grad))
        b13, b2 = self.biases
        if b13 is not None:
            z = z + b13[expert]
        gate, up = z.chunk(2, 1) if self.halves == 2 else (None, z)
        constants = (call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
        if self.wanted.topk_weights and not self.on_input:
            h = self._intermediate(apply_activation(call.activation, gate, up, *constants), expert)
            dw = (h * u).sum(1)
            self._put(self.dw, piece, dw if b2 is None else dw + (grad.to(self.wide) * b2[expert]).sum(1))
        weight = None if self.on_input else call.topk_weights.reshape(-1)[order].to(self.wide)[:, None]
        of_gate, of_up = activation_gradients(
            call.activation, gate, up, u if weight is None else u * weight, *constants
        )
        dz = of_up if of_gate is None else torch.cat((of_gate, of_up), 1)
        if self.db13 is not None:
            self.db13[first : first + w13.shape[0]] += _sums(dz, piece)
        if self.db2 is not None:
            weighted = grad.to(self.wide) if weight is None else grad.to(self.wide) * weight
            self.db2[first : first + w13.shape[0]] += _sums(weighted, piece)
        if self.of_inputs:
            self._put(self.dx, piece, grouped_product(dz.to(self.dtype), w13, piece, transposed=False))

    def _put(self, target: Tensor, piece: Piece, rows: Tensor) -> None:
        if piece.valid is not None:
            valid = piece.valid if rows.ndim == 1 else piece.valid[:, None]
            rows = torch.where(valid, rows, target[piece.places])
        target.index_copy_(0, piece.places, rows)

    def _hidden(self, token: Tensor, expert: Tensor) -> Tensor:
        """The rows of GEMM1 as it multiplies them, in real units."""
        call = self.call
        if call.hidden_states_scale is not None:
            operand = packed_operand(call, call.hidden_states[token], call.hidden_states_scale[token], self.wide)
            values = operand.values if operand.factor is None else operand.values * operand.factor
            if call.act_format == "nvfp4" and call.a1_gscale is not None:
                values = values / call.a1_gscale
            return values.to(self.dtype)
        return self._rounded(self.x[token], call.a1_gscale, expert).to(self.dtype)

    def _intermediate(self, h: Tensor, expert: Tensor) -> Tensor:
        """The rows of GEMM2 as it multiplies them, in real units."""
        call = self.call
        if call.act_format == "none":
            packed = call.hidden_states_scale is not None
            return h if packed else h.to(call.hidden_states.dtype).to(self.wide)
        return self._rounded(h, call.a2_gscale, expert).to(self.wide)

    def _rounded(self, rows: Tensor, gscale: Tensor | None, expert: Tensor) -> Tensor:
        act_format = self.call.act_format
        if act_format == "none":
            return rows
        of_rows = gscale[expert] if gscale is not None and gscale.ndim else gscale
        group = SCHEMES[self.call.scheme].fp8_group
        values, factor = quantized_operand(act_format, rows, of_rows, group, self.wide)
        if factor is not None:
            values = values * factor
        if act_format == "nvfp4" and of_rows is not None:
            values = values / (of_rows[:, None] if of_rows.ndim else of_rows)
        return values

    def _weighed_input(self) -> Tensor:
        x = self.call.hidden_states
        return (x.to(self.wide) * self.call.topk_weights.to(self.wide)).to(x.dtype)

    def _biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Both biases in checkpoint order, [experts, rows] and [experts, hidden_size]."""
        found = []
        for name, halves in (("w13_bias", self.halves), ("w2_bias", 1)):
            bias = getattr(self.call, name)
            if bias is not None:
                if self.backend.bias_layout is not None:
                    bias = self.backend.bias_layout.undo(name, bias, halves)
                bias = bias.to(self.wide) if name == "w13_bias" else bias[:, : self.sizes.hidden_size].to(self.wide)
            found.append(bias)
        return found[0], found[1]

    def _gradients(self) -> Gradients:
        wanted, call = self.wanted, self.call
        dx = self._combined() if self.of_inputs else None
        dw = None
        if wanted.topk_weights and not self.on_input:
            dw = torch.empty_like(self.dw).index_copy_(0, self.pairs.order, self.dw).view(call.topk_ids.shape)
        if self.on_input and dx is not None:
            dw = (call.hidden_states.to(self.wide) * dx).sum(1, keepdim=True) if wanted.topk_weights else None
            dx = dx * call.topk_weights.to(self.wide)
        dx = dx if wanted.hidden_states else None
        return Gradients(dx, dw, self._arranged("w13_bias", self.db13), self._arranged("w2_bias", self.db2))

    def _combined(self) -> Tensor:
        """The sum over each token's local slots, ascending: [num_tokens, hidden_size]."""
        tokens, top_k = self.call.topk_ids.shape
        places = torch.empty_like(self.pairs.order)
        places[self.pairs.order] = torch.arange(places.shape[0], device=places.device)
        local = places < self.pairs.ends[-1]
        total = self.grad.new_zeros((tokens, self.sizes.hidden_size), dtype=self.wide)
        if not self.dx.shape[0]:
            return total
        places = torch.where(local, places, 0).view(tokens, top_k)
        for j, mine in enumerate(local.view(tokens, top_k).unbind(1)):
            total += torch.where(mine[:, None], self.dx[places[:, j]].to(self.wide), 0.0)
        return total

    def _arranged(self, name: str, bias: Tensor | None) -> Tensor | None:
        if bias is None or self.backend.bias_layout is None:
            return bias
        return self.backend.bias_layout.arrange(name, bias, self.halves if name == "w13_bias" else 1)


def _sums(rows: Tensor, piece: Piece) -> Tensor:
    """The rows of each expert added up, in an order that is always the same: [experts, columns]."""
    if piece.host_ends is None:
        experts = torch.arange(piece.ends.shape[0], device=rows.device)
        assert piece.valid is not None
        mine = (piece.expert == experts[:, None]) & piece.valid
        # No product: it would depend on the precision that is set for them, and cuBLAS may not start while captured.
        return torch.stack([torch.where(chosen[:, None], rows, 0.0).sum(0) for chosen in mine])
    sizes = [end - start for start, end in zip([0, *piece.host_ends[:-1]], piece.host_ends, strict=True)]
    return torch.stack([of_expert.sum(0) for of_expert in rows.split(sizes)])

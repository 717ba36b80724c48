"""The gradient of a routed layer, from its inputs alone: what the forward pass made in between is made again.

Of a pair of token t and expert e with weight w, whose output is w * y (oracle/reference.py), and G = grad[t]:

    z = W13 A1(x[t]) + b13,   h = act(z),   u = W2' G
    dw = <A2(h), u> + <b2, G>,   dz = act'(z) w u,   dx = W13' dz,   db13 = dz,   db2 = w G

A1 and A2 round as the forward pass does, and pass gradients through as if they did not (straight-through). Sums over
the pairs of a token are in float32, slots ascending, and those over the tokens of an expert ascend too: a result does
not change from run to run. Weights are decoded a few experts at a time. What adapters add: lora.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients.activations import activation_gradients
from torch_moe_ops.gradients.layer_pass import LayerPass, kept_rows
from torch_moe_ops.gradients.lora import NO_LORA, Lora
from torch_moe_ops.gradients.on_gpu import make_pass, run_pass
from torch_moe_ops.gradients.pairs import Piece
from torch_moe_ops.gradients.products import device_of, grouped_product, triton_serves


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    hidden_states: bool
    topk_weights: bool
    w13_bias: bool
    w2_bias: bool


class Gradients(NamedTuple):
    """Gradients of the arguments of these names, like them in shape; None where not wanted.

    hidden_states: float32 or wider, or rounded to their dtype. topk_weights and biases: float32 (float64 where
    hidden_states are).
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
    return Backward(call, backend, sizes, grad, wanted).run()


def on_gpu_serves(call: ExpertsCall) -> bool:
    """Whether a pass is one of Triton's kernels (on_gpu.py)."""
    return call.act_format == "none" and triton_serves(call.hidden_states)


class Backward(LayerPass):
    """One backward pass. The factors of `lora` add their gradients up themselves."""

    def __init__(
        self, call: ExpertsCall, backend: Backend, sizes: Sizes, grad: Tensor, wanted: Wanted, lora: Lora = NO_LORA
    ) -> None:
        super().__init__(call, backend, sizes, lora)
        self.grad, self.wanted = grad, wanted
        self.of_inputs = wanted.hidden_states or (self.on_input and wanted.topk_weights)

    def run(self) -> Gradients:
        call, wanted = self.call, self.wanted
        if not on_gpu_serves(call):
            return self._in_pieces()
        hidden_dtype = self.wide if self.on_input else call.hidden_states.dtype
        weights = wanted.topk_weights and not self.on_input
        with device_of(self.grad):
            p = make_pass(call, self.sizes, self.grad, self.x, self.biases)
            of_x = hidden_dtype if self.of_inputs else None
            found = run_pass(p, self.backend, of_x, weights, wanted.w13_bias, wanted.w2_bias, self.lora)
            return self._gradients(*found)

    def _in_pieces(self) -> Gradients:
        grad, sizes, wanted = self.grad, self.sizes, self.wanted
        places, rows = self.pairs.order.shape[0], self.local_pairs
        self.dx = grad.new_empty((rows if self.of_inputs else 0, sizes.hidden_size), dtype=self.dtype)
        self.dw = grad.new_zeros(places, dtype=self.wide)
        self.db13, self.db2 = (
            grad.new_zeros((sizes.num_experts, n), dtype=self.wide) if asked else None
            for n, asked in (
                (self.halves * sizes.intermediate_size, wanted.w13_bias),
                (sizes.hidden_size, wanted.w2_bias),
            )
        )
        for piece, first, w13, w2 in self.weighted_pieces():
            self._add(piece, first, w13, w2)
        dx = self.combined(self.dx) if self.of_inputs else None
        dw = torch.empty_like(self.dw).index_copy_(0, self.pairs.order, self.dw)
        return self._gradients(dx, dw, self.db13, self.db2)

    def _add(self, piece: Piece, first: int, w13: Tensor, w2: Tensor) -> None:
        order = self.pairs.order[piece.places]
        token, weight = order // self.top_k, None
        if not self.on_input:
            weight = self.call.topk_weights.reshape(-1)[order].to(self.wide)[:, None]
        z = self.pre_activation(piece, first, w13, token)
        grad = kept_rows(self.grad[token].to(self.dtype), piece)
        u = self._of_intermediate(z, grad, weight, piece, first, w2, token)
        gate, up = z.chunk(2, 1) if self.halves == 2 else (None, z)
        weighted = u if weight is None else u * weight
        of_gate, of_up = activation_gradients(self.call.activation, gate, up, weighted, *self.constants)
        dz = of_up if of_gate is None else torch.cat((of_gate, of_up), 1)
        experts = slice(first, first + w13.shape[0])
        if self.db13 is not None:
            self.db13[experts] += _sums(dz, piece)
        if self.db2 is not None:
            wide = grad.to(self.wide)
            self.db2[experts] += _sums(wide if weight is None else wide * weight, piece)
        self._of_hidden(dz.to(self.dtype), piece, first, w13, token)

    def _of_intermediate(
        self, z: Tensor, grad: Tensor, weight: Tensor | None, piece: Piece, first: int, w2: Tensor, token: Tensor
    ) -> Tensor:
        """The gradient of the intermediate, and on the way those of the routing weights and of w2's adapters."""
        expert = piece.expert + first
        u = kept_rows(grouped_product(grad, w2, piece, transposed=False).to(self.wide), piece)
        of_weights = self.wanted.topk_weights and not self.on_input
        h = self.activated(z) if of_weights or self.lora.w2 is not None else z
        dw = (self.intermediate(h, expert) * u).sum(1) if of_weights else None
        if self.lora.w2 is not None:
            plain = self.plain_intermediate(h)
            found = self.lora.w2.backward(plain.to(self.dtype), grad, weight, piece, first, token)
            if isinstance(found, Tensor):
                found = kept_rows(found, piece)
                dw = None if dw is None else dw + (plain * found).sum(1)
                u = u + found
        b2 = self.biases[1]
        if dw is not None:
            self.put(self.dw, piece, dw if b2 is None else dw + (grad.to(self.wide) * b2[expert]).sum(1))
        return u

    def _of_hidden(self, dz: Tensor, piece: Piece, first: int, w13: Tensor, token: Tensor) -> None:
        found: Tensor | float = 0.0
        if self.lora.w13 is not None:
            found = self.lora.w13.backward(self.x[token].to(self.dtype), dz, None, piece, first, token)
        if self.of_inputs:
            dx = grouped_product(dz, w13, piece, transposed=False)
            self.put(self.dx, piece, (dx.to(self.wide) + found).to(self.dtype) if isinstance(found, Tensor) else dx)

    def _gradients(
        self, dx: Tensor | None, of_slots: Tensor | None, db13: Tensor | None, db2: Tensor | None
    ) -> Gradients:
        """From those of what GEMM1 multiplied, of the weights of slots, and of biases in checkpoint order."""
        wanted, call = self.wanted, self.call
        dw = of_slots.view(call.topk_ids.shape) if wanted.topk_weights and of_slots is not None else None
        if self.on_input and dx is not None:
            dw = (call.hidden_states.to(self.wide) * dx).sum(1, keepdim=True) if wanted.topk_weights else None
            dx = dx * call.topk_weights.to(self.wide)
        dx = dx if wanted.hidden_states else None
        return Gradients(dx, dw, self._arranged("w13_bias", db13), self._arranged("w2_bias", db2))

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

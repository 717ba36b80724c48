"""What every pass over the pairs of a routed layer does alike: rows as GEMMs take them, weights in pieces, sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core.activations import apply_activation
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients.lora import Lora
from torch_moe_ops.gradients.pairs import PIECE_ELEMENTS, Pairs, Piece, pieces, sort_pairs
from torch_moe_ops.gradients.products import grouped_product, product_dtype
from torch_moe_ops.gradients.weights import decode_experts, experts_at_once
from torch_moe_ops.oracle.operands import packed_operand, quantized_operand


class LayerPass:
    """One pass, forward or backward: what all of its pieces share.

    Args:
        call: checked and complete, tensors contiguous.
        sizes: of the layer, the intermediate size as the layout pads it.
        lora: adapters of the experts, if any.
    """

    def __init__(self, call: ExpertsCall, backend: Backend, sizes: Sizes, lora: Lora) -> None:
        self.call, self.backend, self.sizes, self.lora = call, backend, sizes, lora
        self.dtype = product_dtype(call.hidden_states)
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.halves = 2 if sizes.is_gated else 1
        self.top_k = call.topk_ids.shape[1]
        self.on_input = call.router_weight_on_input
        self.constants = (call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
        self.x = self._weighed_input() if self.on_input else call.hidden_states
        self.biases = self._biases()

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs, sorted by expert. Waits for the device, but for a stream that is captured."""
        return sort_pairs(self.call.topk_ids, self.call.local_expert_offset, self.sizes.num_experts)

    @property
    def local_pairs(self) -> int:
        """How many pairs have a local expert; as many as there are pairs where the host may not know."""
        return self.pairs.order.shape[0] if self.pairs.host_ends is None else self.pairs.host_ends[-1]

    def weighted_pieces(self) -> Iterator[tuple[Piece, int, Tensor, Tensor]]:
        """Every piece of the pairs, the expert that it counts from, and the weights of its experts, w13 and w2."""
        count = self.sizes.num_experts
        step = experts_at_once(self.call, self.backend, self.sizes, self.dtype)
        widest = max(self.halves * self.sizes.intermediate_size, self.sizes.hidden_size)
        for first in range(0, count, step):
            last, w13 = min(first + step, count), None
            for piece in pieces(self.pairs, first, last, max(1, PIECE_ELEMENTS // widest)):
                if w13 is None:  # not for experts that nobody visits
                    chosen = slice(first, last)
                    w13, w2 = decode_experts(self.call, self.backend, self.sizes, chosen, self.dtype)
                yield piece, first, w13, w2

    def pre_activation(self, piece: Piece, first: int, w13: Tensor, token: Tensor) -> Tensor:
        """The rows of a piece before the activation: [rows, halves * intermediate_size], wide."""
        expert = piece.expert + first
        z = grouped_product(self._hidden(token, expert), w13, piece, transposed=True).to(self.wide)
        if self.lora.w13 is not None:
            z = z + self.lora.w13.addend(self.x[token].to(self.dtype), piece, first, token)
        z = kept_rows(z, piece)
        b13 = self.biases[0]
        return z if b13 is None else z + b13[expert]

    def activated(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, 1) if self.halves == 2 else (None, z)
        return apply_activation(self.call.activation, gate, up, *self.constants)

    def intermediate(self, h: Tensor, expert: Tensor) -> Tensor:
        """The rows of GEMM2 as it multiplies them, in real units."""
        call = self.call
        if call.act_format == "none":
            packed = call.hidden_states_scale is not None
            return h if packed else self.plain_intermediate(h)
        return self._rounded(h, call.a2_gscale, expert).to(self.wide)

    def plain_intermediate(self, h: Tensor) -> Tensor:
        """Rounded to the dtype of the hidden states alone, as adapters see it."""
        return h.to(self.call.hidden_states.dtype).to(self.wide)

    def put(self, target: Tensor, piece: Piece, rows: Tensor) -> None:
        """Write the rows of a piece where their places are."""
        if piece.valid is not None:
            valid = piece.valid if rows.ndim == 1 else piece.valid[:, None]
            rows = torch.where(valid, rows, target[piece.places])
        target.index_copy_(0, piece.places, rows)

    def combined(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum over each token's local slots, ascending: [num_tokens, hidden_size], wide.

        Args:
            rows: [local pairs, hidden_size] by place.
            weights: [num_tokens, top_k], multiplies them.
        """
        tokens, top_k = self.call.topk_ids.shape
        places = torch.empty_like(self.pairs.order)
        places[self.pairs.order] = torch.arange(places.shape[0], device=places.device)
        local = places < self.pairs.ends[-1]
        total = rows.new_zeros((tokens, self.sizes.hidden_size), dtype=self.wide)
        if not rows.shape[0]:
            return total
        places = torch.where(local, places, 0).view(tokens, top_k)
        for j, mine in enumerate(local.view(tokens, top_k).unbind(1)):
            term = rows[places[:, j]].to(self.wide)
            if weights is not None:
                term = term * weights[:, j, None].to(self.wide)
            total += torch.where(mine[:, None], term, 0.0)
        return total

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


def kept_rows(rows: Tensor, piece: Piece) -> Tensor:
    """Zeros where rows are not valid: what a product left there is undefined."""
    return rows if piece.valid is None else torch.where(piece.valid[:, None], rows, 0.0)

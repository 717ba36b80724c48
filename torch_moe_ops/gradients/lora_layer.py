"""A routed layer with adapters beside its packed experts, forward and backward.

Of a pair of token t and expert e, with D B @ A of its adapter, scaled:

    z = W13 A1(x[t]) + D13 x[t] + b13,   h = act(z),   y = W2 A2(h) + D2 h' + b2

A1 and A2 round as the layer's activation format says; adapters see what is not quantized: x, and h', which is h rounded
to the dtype of the hidden states.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients.experts import Backward, Wanted, on_gpu_serves
from torch_moe_ops.gradients.layer_pass import LayerPass
from torch_moe_ops.gradients.lora import Lora, LoraArguments
from torch_moe_ops.gradients.on_gpu import make_pass, run_forward
from torch_moe_ops.gradients.pairs import Piece
from torch_moe_ops.gradients.products import device_of, grouped_product


class WantedLora(NamedTuple):
    """Which gradients are asked for."""

    hidden_states: bool
    topk_weights: bool
    w13_bias: bool
    w2_bias: bool
    lora_a13: bool
    lora_b13: bool
    lora_a2: bool
    lora_b2: bool


def lora_layer(call: ExpertsCall, backend: Backend, sizes: Sizes, lora: LoraArguments) -> Tensor:
    """[num_tokens, hidden_size], rounded to the dtype of the output at most.

    Arguments as in `experts_gradients`; hidden states unquantized.
    """
    return _Forward(call, backend, sizes, Lora.of(lora, sizes, call.hidden_states)).run()


def lora_gradients(
    call: ExpertsCall, backend: Backend, sizes: Sizes, lora: LoraArguments, grad: Tensor, wanted: WantedLora
) -> tuple[Tensor | None, ...]:
    """In the order of `wanted`, None where not wanted, float32 or wider; shaped like the arguments."""
    factors = Lora.of(lora, sizes, call.hidden_states)
    for of_projection, a, b in ((factors.w13, *wanted[4:6]), (factors.w2, *wanted[6:8])):
        if of_projection is not None:
            of_projection.want(a, b)
    found = Backward(call, backend, sizes, grad, Wanted(*wanted[:4]), factors).run()
    of_factors = [(None, None) if f is None else f.gradients() for f in factors]
    return (*found, *of_factors[0], *of_factors[1])


class _Forward(LayerPass):
    """One forward pass."""

    def run(self) -> Tensor:
        call = self.call
        if on_gpu_serves(call):
            with device_of(self.x):
                p = make_pass(call, self.sizes, self.x, self.x, self.biases)
                return run_forward(p, self.backend, self.lora, call.out_dtype or call.hidden_states.dtype)
        y = call.hidden_states.new_empty((self.local_pairs, self.sizes.hidden_size), dtype=self.wide)
        for piece, first, w13, w2 in self.weighted_pieces():
            self.put(y, piece, self._rows(piece, first, w13, w2))
        return self.combined(y, None if self.on_input else call.topk_weights)

    def _rows(self, piece: Piece, first: int, w13: Tensor, w2: Tensor) -> Tensor:
        expert, token = piece.expert + first, self.pairs.order[piece.places] // self.top_k
        h = self.activated(self.pre_activation(piece, first, w13, token))
        rows = self.intermediate(h, expert).to(self.dtype)
        y = grouped_product(rows, w2, piece, transposed=True).to(self.wide)
        if self.lora.w2 is not None:
            y = y + self.lora.w2.addend(self.plain_intermediate(h).to(self.dtype), piece, first, token)
        b2 = self.biases[1]
        return y if b2 is None else y + b2[expert]

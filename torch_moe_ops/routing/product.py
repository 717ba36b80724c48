"""Router logits from hidden states, in torch: what `moeq::route_hidden` multiplies where no kernel does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

_HALVES = (torch.bfloat16, torch.float16)


def router_logits(
    hidden_states: Tensor, router_weight: Tensor, router_bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """hidden_states @ router_weight.T + router_bias: sums in float32 of the operands as they are, rounded once.

    Where all of them have one dtype, and `dtype` is it too, these are the bits of torch.nn.functional.linear.

    Args:
        hidden_states: [num_tokens, hidden_size]; router_weight: [num_experts, hidden_size]; router_bias: [num_experts]
            or None; any of bfloat16, float16 and float32.

    Returns: [num_tokens, num_experts].
    """
    given = {t.dtype for t in (hidden_states, router_weight, router_bias) if t is not None}
    if given == {dtype}:
        return linear(hidden_states, router_weight, router_bias)
    halves = hidden_states.dtype == router_weight.dtype and hidden_states.dtype in _HALVES
    if halves and hidden_states.is_cuda:  # on a CPU torch has no such product
        sums = torch.mm(hidden_states, router_weight.T, out_dtype=torch.float32)
        sums = sums if router_bias is None else sums + router_bias.float()
    else:
        sums = linear(
            hidden_states.float(), router_weight.float(), None if router_bias is None else router_bias.float()
        )
    return sums.to(dtype)

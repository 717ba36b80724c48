"""What Python and the kernels that route on Hopper have to agree on; kernel_facts.py has it of other kernels.

`python scripts/kernel_headers.py --write` writes csrc/generated/router.h from it.
"""

from __future__ import annotations


class RouteHidden:
    """The router's product and its choice in one launch, for Hopper."""

    MAX_ROUTER_EXPERTS = 512  # a block has all logits of a token, and the parts that they are sums of
    MAX_WARPS = 16  # of a block
    SIZE_MULTIPLE = 8  # of the hidden size, in elements: loads have 16 bytes


# What ops get behind a Router and ids and weights, which they fill: of experts that every token goes to.
SHARED_EXPERTS = {"num_shared_experts": "int", "shared_expert_weights": "Tensor | None"}
# And route_hidden_sm90, which fills the router's logits, too.
ROUTE_HIDDEN_SM90 = {
    "hidden_states": "Tensor",
    "router_weight": "Tensor",
    "router_bias": "Tensor | None",
    **SHARED_EXPERTS,
    "blocks": "int",
    "warps": "int",
}

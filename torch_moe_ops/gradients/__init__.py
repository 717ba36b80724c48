"""Derivatives of the ops, in plain torch: routing, activations, experts, and linears of packed experts."""

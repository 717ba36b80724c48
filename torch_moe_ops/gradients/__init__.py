"""Derivatives of the ops: routing, activations, experts, and linears of packed experts."""

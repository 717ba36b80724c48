"""Derivatives of the ops, in plain torch: routing, activations, and experts, whose weights are decoded in chunks."""

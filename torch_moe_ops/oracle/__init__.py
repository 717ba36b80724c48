"""The reference: every rounding step of a layer in plain torch, against which each backend is measured."""

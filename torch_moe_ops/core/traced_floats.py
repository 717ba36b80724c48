"""Floats that torch.compile takes for constants.

Dynamo makes a symbol of a float attribute (the first time with dynamic=True, else once a second value is seen). An op
cannot take a symbol for a float, so it is found out late that the value is a constant after all, and all is compiled
again. A string is a constant from the start, guarded by equality: one graph for each value, compiled once.
"""

from __future__ import annotations


def text_of(value: float | None) -> str | None:
    """What a traced function reads in the place of the float."""
    return None if value is None else str(float(value))


def float_of(text: str | None) -> float | None:
    """Inverse of text_of."""
    return None if text is None else float(text)

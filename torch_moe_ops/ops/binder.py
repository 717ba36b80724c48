"""From the positional arguments of an expert op to an ExpertsCall."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import FAMILIES, arguments, family_of


class Binder:
    """Turns the positional arguments of one op into an ExpertsCall, plus what the op has besides."""

    def __init__(self, op: str):
        schemes = FAMILIES[family_of(op)]
        scheme = schemes[0]
        self.names, self.defaults = arguments(op)
        self.position = {name: i for i, name in enumerate(self.names)}
        # Fields that the op lacks are read from two constants appended to the arguments.
        absent, zero = len(self.names), len(self.names) + 1
        extra = {"scheme": zero, "act_format": zero + 1, "router_weight_on_input": zero + 2}
        self.pick = itemgetter(*(self.position.get(f, extra.get(f, absent)) for f in FIELDS))
        self.tail = (*self.defaults, None, scheme.name, scheme.act_formats[0], False)
        # A family with several elements says by an argument which scheme is meant.
        self.elements = {s.element: s.name for s in schemes} if len(schemes) > 1 else {}
        self.op = op

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in schema order, then the constants."""
        full = args + self.tail[len(args) :]
        if not kwargs:
            return full
        filled = list(full)
        for name, value in kwargs.items():
            filled[self.position[name]] = value
        return tuple(filled)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsCall:
        """The arguments of one call."""
        full = self.fill(args, kwargs) if kwargs else args + self.tail[len(args) :]
        return self.call(full) if self.elements else tuple.__new__(ExpertsCall, self.pick(full))

    def call(self, full: tuple[Any, ...]) -> ExpertsCall:
        call = tuple.__new__(ExpertsCall, self.pick(full))
        return self._named(call, full[self.position["element"]]) if self.elements else call

    def _named(self, call: ExpertsCall, element: str) -> ExpertsCall:
        if element not in self.elements:
            fail(self.op, "element", f"be one of {list(self.elements)}", element)
        return call._replace(scheme=self.elements[element])

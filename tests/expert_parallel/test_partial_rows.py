"""Partial rows in 8 bits, in one process: op, formula, scales, refusals. Of several: test_ranks.py."""

from __future__ import annotations

import pytest
import torch
from ep_partial_rows import bound, rounded
from groups_of_one import group_of_one
from torch import Tensor

from torch_moe_ops.transports import p2p
from torch_moe_ops.transports.members import Member, Wanted
from torch_moe_ops.transports.partial_rows import bytes_of_partial_row, decode, encode
from torch_moe_ops.transports.registry import choose

E4M3 = torch.float8_e4m3fn


def _combined(rows: Tensor, transport: str = "nccl") -> Tensor:
    nowhere = torch.empty(0, 1, dtype=torch.int32)
    head = (transport, group_of_one("cpu"), 1, rows.shape[0])
    args = (rows, nowhere, rows.shape[0], *head, torch.float32)
    return torch.ops.moeq.ep_combine(*args, wire_dtype=E4M3)


@pytest.mark.parametrize("hidden", [1, 64, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op_rounds_as_the_formula_says(hidden: int, dtype: torch.dtype) -> None:
    rows = torch.randn(9, hidden) * torch.logspace(-30, 30, 9)[:, None]
    rows[3] = 0
    rows = rows.to(dtype)
    got = _combined(rows)
    assert torch.equal(got, rounded(rows.float()))
    assert ((got.double() - rows.double()).abs() <= bound(rows.double())).all()
    assert not got[3].any()


def test_codes_and_scales_are_what_is_counted() -> None:
    codes, scale = encode(torch.randn(5, 300))
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (E4M3, (5, 300), torch.float32, (5, 3))
    assert bytes_of_partial_row(300, E4M3) == codes[0].nbytes + scale[0].nbytes == 312
    assert bytes_of_partial_row(300, torch.bfloat16) == 600
    assert torch.equal(decode(codes, scale), _combined(torch.zeros(5, 300) + decode(codes, scale)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_takes_its_group_alone(value: float) -> None:
    rows = torch.randn(3, 300)
    want = _combined(rows)
    rows[1, 130] = value
    got = _combined(rows)
    assert got[1, 128:256].isnan().all()
    got[1, 128:256] = want[1, 128:256]
    assert torch.equal(got, want)


def test_a_large_value_costs_its_group_alone() -> None:
    """With one scale for the row, what is 10^5 times smaller would be left with a bit or two."""
    rows = torch.randn(64, 1024)
    rows[:, 0] = 1e6
    others = rows[:, 128:]
    error = (_combined(rows)[:, 128:] - others).norm() / others.norm()
    scale = rows.abs().amax(-1, keepdim=True) / 448
    of_whole_rows = ((others / scale).to(E4M3).float() * scale - others).norm() / others.norm()
    assert error < 0.03 and of_whole_rows > 0.2, (error, of_whole_rows)


def test_p2p_refuses_and_auto_goes_on() -> None:
    gpus = ("a", "b")
    members = tuple(Member("host", gpu, gpus, "") for gpu in gpus)
    assert p2p.reason_against(Wanted(members, 64, 0)) is None
    wanted = Wanted(members, 64, 0, E4M3)
    reason = "it sends partial rows as they are, torch.float8_e4m3fn is of transport 'nccl'"
    transport, against = choose("auto", wanted)
    assert (transport.name, against) == ("nccl", {"p2p": reason})
    with pytest.raises(ValueError, match="transport 'p2p' cannot serve this layer: it sends partial rows as they are"):
        choose("p2p", wanted)
    with pytest.raises(RuntimeError, match="wire_dtype must be None with transport 'p2p'"):
        _combined(torch.zeros(2, 64), "p2p")

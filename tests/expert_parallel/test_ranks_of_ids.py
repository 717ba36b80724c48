"""Which ranks have an expert of a token, for ids that lie in memory in any way."""

from __future__ import annotations

import warnings

import torch

from torch_moe_ops.transports import nccl
from torch_moe_ops.transports.exchange import Exchange


def test_ids_that_are_not_contiguous_bring_no_warning() -> None:
    """torch.searchsorted warns of them once in a process, and of each once it is told so."""
    ids = torch.tensor([[0, 1], [2, 3], [-1, 0], [3, 0]])
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = nccl._needed(ids.T.contiguous().T, Exchange("a group", 2, 4, (2, 2)))
    finally:
        torch.set_warn_always(always)
    assert found.tolist() == [[True, False], [False, True], [True, False], [True, True]]

"""What a CUDA device is, asked once in a process: torch's own answers take microseconds each."""

from __future__ import annotations

from functools import cache

import torch


def capability_of(device: torch.device) -> tuple[int, int]:
    return _facts(_index(device))[0]


def processors_of(device: torch.device) -> int:
    """Its multiprocessors."""
    return _facts(_index(device))[1]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _facts(index: int) -> tuple[tuple[int, int], int]:
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count

"""Weights that are prepared for the CPU ask for huge pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_moe_ops.backends.cpu_panels import layout
from torch_moe_ops.backends.cpu_panels.huge_pages import PAGE, with_huge_pages

SMAPS, SETTING = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
linux = pytest.mark.skipif(
    sys.platform != "linux" or not SMAPS.exists() or not SETTING.exists(), reason="needs Linux with huge pages"
)


def flags_at(address: int) -> list[str]:
    """VmFlags of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the address lies in no mapping")


@linux
def test_packed_weights_ask_for_them() -> None:
    codes = torch.randint(0, 256, (4, 2048, 1024), dtype=torch.uint8)
    packed = layout.pack_weight("nvfp4", codes, True)
    inside = packed.data_ptr() + packed.nbytes // 2
    assert "hg" in flags_at(inside)
    assert "hg" not in flags_at(codes.data_ptr() + codes.nbytes // 2)
    assert torch.equal(layout.unpack_weight("nvfp4", packed, 2048, 2048, True), codes)


def test_what_holds_no_such_page_or_no_memory_stays_as_it_is() -> None:
    small = torch.zeros(PAGE // 2, dtype=torch.uint8)
    assert with_huge_pages(small) is small
    meta = torch.empty(4 * PAGE, dtype=torch.uint8, device="meta")
    assert with_huge_pages(meta) is meta
    with FakeTensorMode():
        fake = torch.empty(4 * PAGE, dtype=torch.uint8)
        assert with_huge_pages(fake) is fake

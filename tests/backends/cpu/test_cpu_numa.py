"""Weights over all NUMA nodes; a machine with one node has the policy, too."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_moe_ops.backends.cpu_panels import layout, numa

MAPS = Path("/proc/self/numa_maps")


def policy_at(address: int) -> str:
    """Of the mapping that holds an address."""
    mappings = [line.split()[:2] for line in MAPS.read_text().splitlines()]
    return max((int(begin, 16), policy) for begin, policy in mappings if int(begin, 16) <= address)[1]


def packed() -> torch.Tensor:
    codes = torch.randint(0, 256, (4, 2048, 1024), dtype=torch.uint8)
    result = layout.pack_weight("nvfp4", codes, True)
    assert torch.equal(layout.unpack_weight("nvfp4", result, 2048, 2048, True), codes)
    return result


@pytest.mark.skipif(sys.platform != "linux" or not MAPS.exists(), reason="needs Linux with NUMA policies")
def test_packed_weights_are_interleaved_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed()
    assert policy_at(plain.data_ptr() + plain.nbytes // 2) == "default"
    monkeypatch.setenv("MOEQ_CPU_INTERLEAVE", "1")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        spread = packed()
    if said:
        assert "does not interleave memory" in str(said[0].message)
        pytest.skip(str(said[0].message))
    assert policy_at(spread.data_ptr() + spread.nbytes // 2).startswith("interleave:")


def test_a_refusal_is_said_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_CPU_INTERLEAVE", "1")
    monkeypatch.setattr(numa, "allowed_nodes", lambda: [1000])  # there is none
    with pytest.warns(UserWarning, match="MOEQ_CPU_INTERLEAVE=1"):
        packed()


def test_what_has_no_memory_of_its_own_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_CPU_INTERLEAVE", "1")
    small = torch.zeros(16, dtype=torch.uint8)
    assert numa.interleaved(small) is small
    meta = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    assert numa.interleaved(meta) is meta
    with FakeTensorMode():
        fake = torch.empty(1 << 20, dtype=torch.uint8)
        assert numa.interleaved(fake) is fake


@pytest.mark.parametrize(("text", "nodes"), [("0", [0]), ("0-1", [0, 1]), ("0,2-4", [0, 2, 3, 4])])
def test_lists_of_nodes(text: str, nodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t{text}\n")
    monkeypatch.setattr(numa, "STATUS", status)
    assert numa.allowed_nodes() == nodes

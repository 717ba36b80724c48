"""Shared libraries with the device code of one kind of GPU: which parts of a fat binary stay."""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from paths import ROOT

PTX, CODE = 1, 2


@pytest.fixture
def fatbins(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("thin_fatbins")
    del sys.modules["thin_fatbins"]


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    """As nvcc writes it: a header of 64 bytes, of which the fields that matter here are filled."""
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, arch)
    return head.ljust(64, b"\1") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def payloads(fatbins: ModuleType, data: bytes) -> list[list[bytes]]:
    return [[data[e.begin : e.begin + e.size] for e in each] for each in fatbins.containers(data)]


def test_machine_code_of_the_gpu_stays_and_the_rest_is_zeros(fatbins: ModuleType) -> None:
    own = container(entry(CODE, 80, b"eighty"), entry(CODE, 90, b"ninety"), entry(CODE, 100, b"hundred"))
    data, zeroed = fatbins.thin(b"elf" + own + b"tail", 90)
    assert payloads(fatbins, data) == [[bytes(6), b"ninety", bytes(7)]] and zeroed == 13
    assert data.startswith(b"elf") and data.endswith(b"tail") and len(data) == len(own) + 7


def test_code_of_another_generation_does_not_run_so_its_ptx_stays(fatbins: ModuleType) -> None:
    """Machine code of 8.0 does not run on 9.0: Marlin's kernels are compiled by the driver there."""
    data, _ = fatbins.thin(container(entry(PTX, 80, b"ptx"), entry(CODE, 80, b"code"), entry(CODE, 120, b"new")), 90)
    assert payloads(fatbins, data) == [[b"ptx", bytes(4), bytes(3)]]


def test_the_newest_code_of_the_same_generation_is_taken(fatbins: ModuleType) -> None:
    data, _ = fatbins.thin(container(*(entry(CODE, arch, b"x") for arch in (75, 80, 86, 89))), 89)
    assert payloads(fatbins, data) == [[b"\0", b"\0", b"\0", b"x"]]
    data, _ = fatbins.thin(container(*(entry(CODE, arch, b"x") for arch in (80, 86, 89))), 87)
    assert payloads(fatbins, data) == [[b"\0", b"x", b"\0"]]


def test_every_container_is_seen_and_what_only_looks_like_one_is_left_alone(fatbins: ModuleType) -> None:
    false = fatbins.MAGIC + b"\1\0\x10\0" + struct.pack("<Q", 1 << 40)
    parts = [false, container(entry(CODE, 90, b"a")), false, container(entry(CODE, 100, b"b"))]
    data, zeroed = fatbins.thin(b"".join(parts), 90)
    assert payloads(fatbins, data) == [[b"a"], [b"\0"]] and zeroed == 1
    assert data.count(false) == 2


def test_kernels_that_are_not_named_go(fatbins: ModuleType) -> None:
    """A container stays whole where one of its kernels fits."""
    both = container(entry(CODE, 90, b"\0.text._Z4topkv\0.text._Z4gemmv\0"))
    ptx = container(entry(PTX, 80, b".visible .entry _Z6marlinILi1EEvPi("))
    code = b"\0.text._Z6marlinILi2EEvPi\0"
    other = container(entry(CODE, 90, code))
    data, _ = fatbins.thin(both + ptx + other, 90, "topk|marlinILi1E")
    assert data == both + ptx + other[: -len(code)] + bytes(len(code))


@pytest.mark.parametrize("size, fits", [(50, True), (500, False)])
def test_machine_code_takes_the_place_of_ptx(
    fatbins: ModuleType, monkeypatch: pytest.MonkeyPatch, size: int, fits: bool
) -> None:
    given: list[tuple[bytes, int]] = []
    made = container(entry(CODE, 90, b"c" * size))
    monkeypatch.setattr(fatbins, "_machine_code", lambda ptx, arch: [given.append((ptx, arch)), made][1])
    old = container(entry(CODE, 80, b"e" * 100), entry(PTX, 80, b".entry a(\0"))
    after = container(entry(CODE, 90, b"next"))
    data, zeroed = fatbins.thin(old + after, 90, compiles=True)
    assert given == [(b".entry a(", 90)] and len(data) == len(old + after)
    if fits:
        assert data == made.ljust(len(old), b"\0") + after and zeroed == 100 + 10 - len(made)
    else:
        assert payloads(fatbins, data) == [[bytes(100), b".entry a(\0"], [b"next"]] and zeroed == 100

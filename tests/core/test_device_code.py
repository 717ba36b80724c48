"""What compiled kernels hold for which GPU: read from the file, built as the list says, and named where it lacks a GPU."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from host_library import NVCC
from modules_by_path import ROOT, load

from torch_moe_ops.core import device_code, extension
from torch_moe_ops.core.device_code import Target, fat_binaries

cuda_targets = load("scripts/cuda_targets.py")
SM80, SM90A, SM100, SM120, PTX80 = (
    Target(True, 80, ""), Target(True, 90, "a"), Target(True, 100, ""), Target(True, 120, ""), Target(False, 80, "")
)  # fmt: skip
ALL = frozenset({SM80, SM90A, SM100, SM120, PTX80})


def _wanted() -> frozenset[Target]:
    """All targets that the nvcc at hand knows."""
    known = cuda_targets.known_numbers(NVCC)
    return frozenset(t for t in ALL if str(t.number) in known)


def _entry(kind: int, number: int, flags: int = 0, payload: int = 24, header: int = 64) -> bytes:
    head = struct.pack("<HHIQ12xI8xQ", kind, 0x101, header, payload, number, flags)
    return head.ljust(header, b"\0") + b"\xaa" * payload


def _fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_file_is_read_wherever_its_fat_binaries_lie(tmp_path: Path) -> None:
    first = _fat_binary(_entry(2, 80), _entry(2, 90, 0x100011), _entry(1, 80, header=80, payload=256), _entry(9, 7))
    second = _fat_binary(_entry(2, 103, 0x200011))
    path = tmp_path / "library.so"
    path.write_bytes(b"\x7fELF" + b"\0" * 37 + first + b"text" + second)
    assert fat_binaries(path) == [{SM80, SM90A, PTX80}, {Target(True, 103, "f")}]
    assert sorted(map(str, fat_binaries(path)[0])) == ["compute_80", "sm_80", "sm_90a"]


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_damaged_file_is_read_as_far_as_it_goes(cut: int, tmp_path: Path) -> None:
    whole = _fat_binary(_entry(2, 80), _entry(2, 90, header=0)) + struct.pack("<IHHQ", 0xBA55ED50, 7, 16, 1 << 60)
    (tmp_path / "x").write_bytes(whole[:cut])
    assert all(targets <= {SM80, Target(True, 90, "")} for targets in fat_binaries(tmp_path / "x"))


@pytest.mark.parametrize(
    ("target", "capabilities"),
    [
        (SM80, [(8, 0), (8, 6), (8, 9)]),
        (SM90A, [(9, 0)]),
        (SM100, [(10, 0), (10, 3)]),
        (SM120, [(12, 0), (12, 1)]),
        (PTX80, [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]),
        (Target(False, 90, "a"), [(9, 0)]),
        (Target(True, 100, "f"), [(10, 0), (10, 3)]),
        (Target(True, 86, ""), [(8, 6), (8, 9)]),
    ],
)
def test_which_devices_take_a_target(target: Target, capabilities: list[tuple[int, int]]) -> None:
    devices = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
    assert [device for device in devices if target.runs_on(device)] == capabilities


def _objects(tmp_path: Path, *sources: str) -> dict[str, list[frozenset[Target]]]:
    """What scripts/cuda_compile.sh makes of sources."""
    if NVCC is None:
        pytest.skip("no CUDA compiler (nvcc)")
    environment = {name: value for name, value in os.environ.items() if name != "MOEQ_ARCHS"}
    environment |= {"PYTHON": sys.executable, "NVCC": NVCC, "MOEQ_OBJECTS": str(tmp_path)}
    command = ["bash", str(ROOT / "scripts" / "cuda_compile.sh"), *sources]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem: fat_binaries(path) for path in tmp_path.glob("*.o")}


@pytest.mark.slow
def test_the_generic_kernels_are_built_for_every_target(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
    built = _objects(tmp_path, *sources)
    assert built.keys() == {Path(source).stem for source in sources}
    for name in ("quantize_nvfp4", "dynamic_gscale_nvfp4"):
        assert built[name] == [_wanted()], name


@pytest.mark.slow
def test_the_kernels_for_hopper_are_built_for_it_alone(tmp_path: Path) -> None:
    assert _objects(tmp_path, "csrc/cuda/sm90/prefill/schedule.cu") == {"schedule": [{SM90A}]}


@pytest.mark.skipif(not extension.has_cuda_extension(), reason="torch_moe_ops._C_cuda is not installed")
def test_what_is_installed_holds_every_target() -> None:
    file = extension.cuda_extension_file()
    assert file is not None
    hopper, generic = [], []
    for targets in fat_binaries(Path(file)):
        (hopper if targets == {SM90A} else generic).append(targets)
    assert hopper, "the kernels for Hopper"
    # An older nvcc than 12.8 knows no Blackwell: PTX serves it.
    least = _wanted() if NVCC is not None else frozenset({SM80, SM90A, PTX80})
    assert generic and all(least <= targets <= ALL for targets in generic), generic
    assert all(device_code.missing(device) is None for device in ((8, 0), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0)))


# -- the flags ---------------------------------------------------------------------------------------------------------


def _nvcc(tmp_path: Path, *numbers: str) -> str:
    path = tmp_path / "nvcc"
    path.write_text(f"#!/bin/sh\nprintf 'sm_%s\\n' {' '.join(numbers)}\n")
    path.chmod(0o755)
    return str(path)


def _flags(nvcc: str, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(ROOT / "scripts" / "cuda_targets.py"), nvcc, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_targets_that_nvcc_does_not_know_are_left_out_and_named(tmp_path: Path) -> None:
    old = _nvcc(tmp_path, "80", "86", "89", "90")
    status, flags, said = _flags(old, "generic")
    assert status == 0
    assert flags.splitlines() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert f"{old} does not know sm_100, sm_120: left out, such devices compile the PTX of compute_80" in said
    assert _flags(old, "sm90")[1] == "-gencode=arch=compute_90a,code=sm_90a\n"
    assert _flags(old, "sm90", "80")[:2] == (0, "\n")
    assert _flags(old, "generic", "120")[0] == 2


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU whose capability tests set, and an extension of before PTX and Blackwell were in it."""
    monkeypatch.setattr(device_code, "held", lambda: frozenset({SM80, SM90A}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Thing")
    device_code.missing_on.cache_clear()
    return torch.device("cuda:0")


def _error(monkeypatch: pytest.MonkeyPatch, device: torch.device, capability: tuple[int, int], suffix: str = "") -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device_code.missing_on.cache_clear()
    try:
        device_code.check_device("quantize_nvfp4", "x", device, suffix)
    except RuntimeError as error:
        return str(error)
    finally:
        device_code.missing_on.cache_clear()
    return ""


def test_an_op_names_device_what_the_library_holds_and_what_to_do(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _error(monkeypatch, device, (10, 0)) == (
        "moeq::quantize_nvfp4: x must be on a device that kernels were compiled for (torch_moe_ops._C_cuda holds "
        f"sm_80, sm_90a; to compile for it: {extension.BUILD_CUDA}), got 'NVIDIA Thing of compute capability (10, 0)'"
    )
    assert "its kernels compile for 8.0 and later" in _error(monkeypatch, device, (7, 5))
    assert _error(monkeypatch, device, (8, 9)) == _error(monkeypatch, device, (9, 0)) == ""
    assert "prepare the weights on this device" in _error(monkeypatch, device, (10, 0), "a")
    assert _error(monkeypatch, device, (9, 0), "a") == ""
    monkeypatch.setattr(device_code, "held", lambda: ALL - {SM90A})
    assert f"to compile for it: {extension.BUILD_CUDA}" in _error(monkeypatch, device, (9, 0), "a")
    assert _error(monkeypatch, device, (13, 0)) == "", "PTX"
    monkeypatch.setattr(device_code, "held", lambda: frozenset())
    assert _error(monkeypatch, device, (10, 0)) == "", "nothing is claimed of a file that cannot be read"

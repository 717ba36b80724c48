"""Machine code before and after a change: what counts as the same kernel, and what is told of others."""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

KERNEL = "_ZN4moeq4sm90{}3runEv"
FIRST, SECOND = (f"{len(name)}{name}" for name in ("_GLOBAL__N__0a_7_a_cu_1", "_GLOBAL__N__0b_12_other_cu_22"))


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("compare_machine_code")
    del sys.modules["compare_machine_code"]


def cubin(name: str, code: bytes, *, registers: int = 40, shared: int = 2048, refers_to: str = "table") -> bytes:
    """One kernel, as far as it is compared."""
    strings = b"\0" + name.encode() + b"\0" + refers_to.encode() + b"\0"
    other = 1 + len(name) + 1
    symbols = struct.pack("<IBBHQQ", 1, 0, 0, 0, 0, 0) + struct.pack("<IBBHQQ", other, 0, 0, 0, 0, 0)
    info = struct.pack("<BBHII", 4, 0x2F, 8, 0, registers) + struct.pack("<BBH", 3, 0x36, 1)
    relocation = struct.pack("<QQq", 32, 1 << 32 | 57, 8)
    parts = [
        (".strtab", 3, strings, 0, 0),
        (".symtab", 2, symbols, 0, 1),
        (".nv.info", 0x70000000, info, 0, 2),
        (f".text.{name}", 1, code, 0, 2),
        (f".rela.text.{name}", 4, relocation, 0, 2),
        (f".nv.shared.{name}", 8, b"", shared, 0),
    ]
    texts, heads, body = b"\0", [bytes(64)], b"\x7fELF".ljust(64, b"\0")
    names = "".join(f"{part[0]}\0" for part in parts) + ".shstrtab\0"
    for section, kind, data, size, link in [*parts, (".shstrtab", 3, b"\0" + names.encode(), 0, 0)]:
        head = struct.pack("<IIQQQQIIQQ", len(texts), kind, 0, 0, len(body), size or len(data), link, 0, 1, 0)
        texts += section.encode() + b"\0"
        heads.append(head)
        body += data
    table = struct.pack("<Q", len(body))
    counts = struct.pack("<HH", len(heads), len(heads) - 1)
    return body[:40] + table + body[48:60] + counts + body[64:] + b"".join(heads)


def written(folder: Path, *codes: bytes) -> Path:
    """An object with as many cubins, as nvcc embeds them."""
    folder.mkdir()
    body = b"".join(struct.pack("<HHIQIIHHI", 2, 0x101, 64, len(c), 0, 0, 0, 0, 90).ljust(64, b"\1") + c for c in codes)
    (folder / "a.o").write_bytes(b"ELF" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body)
    return folder


def told(compare: ModuleType, capsys: pytest.CaptureFixture[str], tmp: Path, before: bytes, *after: bytes) -> str:
    failed = compare.main([str(written(tmp / "before", before)), str(written(tmp / "after", *after))])
    out = capsys.readouterr().out
    assert failed == (not out.endswith(" 0 are not\n"))
    return out


def test_a_file_and_its_anonymous_namespace_do_not_count(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, after = (cubin(KERNEL.format(space), b"code", refers_to=f"_ZN{space}1tE") for space in (FIRST, SECOND))
    assert (
        told(compare, capsys, tmp_path, before, after)
        == "1 kernels are equal, 0 but for registers or places, 0 are not\n"
    )


@pytest.mark.parametrize(
    "changed, part",
    [
        (cubin("run", b"code"), None),
        (cubin("run", b"coda"), "text"),
        (cubin("run", b"code", registers=41), "registers 40 -> 41"),
        (cubin("run", b"code", shared=4096), "shared 2048 -> 4096"),
        (cubin("run", b"code", refers_to="other"), "rela.text"),
    ],
)
def test_every_part_of_a_kernel_counts(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: bytes, part: str | None
) -> None:
    out = told(compare, capsys, tmp_path, cubin("run", b"code"), changed)
    wanted = (
        "1 kernels are equal, 0 but for registers or places, 0 are not\n"
        if part is None
        else "0 kernels are equal, 0 but for registers or places, 1 are not\n"
    )
    assert out == ("" if part is None else f"differs: run: {part}\n") + wanted


def test_kernels_without_a_counterpart_are_named(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two of one name, in anonymous namespaces of two files, are compared with what is most alike."""
    first, second = (cubin(KERNEL.format(space), code) for space, code in ((FIRST, b"one"), (SECOND, b"two")))
    out = told(compare, capsys, tmp_path, first, second, first, cubin("new", b"x"))
    assert out.splitlines() == [
        f"only after: {KERNEL.format('A')}",
        "only after: new",
        "1 kernels are equal, 0 but for registers or places, 2 are not",
    ]


def test_a_kernel_may_get_another_name(compare: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = written(tmp_path / "before", cubin("_Z3runv", b"code"))
    after = written(tmp_path / "after", cubin("_Z6finishv", b"code"))
    assert compare.main([str(before), str(after)]) == 1
    assert compare.main([str(before), str(after), "--rename", "3run=6finish"]) == 0
    assert "only before: _Z3runv" in capsys.readouterr().out


def test_how_far_instructions_are_from_each_other(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = {"a": ["MOV R1, c[0x4][0x8]", "FADD R2, R1, R3"], "b": ["MOV R1, c[0x4][0x10]", "FADD R2, R1, R3"]}
    listing |= {"c": ["MOV R7, c[0x4][0x8]", "FADD R2, R7, R3"], "d": ["MOV R1, c[0x4][0x8]", "FMUL R2, R1, R3"]}
    monkeypatch.setattr(compare, "instructions", lambda kernel, nvdisasm: listing[kernel.mangled])
    kernel = {name: compare.Kernel("k", {"text": name}, b"", name) for name in listing}

    def far(name: str) -> str:
        return str(compare.how_far(kernel["a"], kernel[name], "nvdisasm"))

    assert far("b") == "places (text)"
    assert far("c") == "registers (text)"
    assert far("d") == "2 lines of 2 and 2 instructions (text)"

"""What C++ and Python say of the same thing comes from one table: the headers are up to date, and nothing is said twice."""

from __future__ import annotations

import re

import pytest
import torch
from modules_by_path import ROOT, load

from torch_moe_ops.core import extension, kernel_facts
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import FIELDS, INDEX, KERNEL_FIELDS, ExpertsCall, for_kernels, for_kernels_with

SOURCES = ROOT / "csrc"
GENERATED = SOURCES / "generated"
headers = load("scripts/kernel_headers.py")


def test_headers_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in GENERATED.glob("*.h")}
    assert written == headers.headers(), "run `python scripts/kernel_headers.py --write`"


def test_no_other_source_defines_what_the_headers_do() -> None:
    pattern = r"^(?:constexpr [\w ]+[ *](k\w+)|enum class (\w+))"
    found: dict[str, list[str]] = {}
    for path in SOURCES.rglob("*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            space = r"^namespace ([\w:]+) \{"
            # Of w4a8 and sm90 each has tiles of its own.
            for line in re.findall(rf"(?m){space}|{pattern}", path.read_text()):
                scope, *names = line
                if scope:
                    within = scope
                else:
                    found.setdefault(f"{within}::{''.join(names)}", []).append(path.name)
    generated = {name: where for name, where in found.items() if any((GENERATED / file).exists() for file in where)}
    assert len(generated) > 30
    assert not {name: where for name, where in generated.items() if len(where) > 1}


def test_constants_have_the_values_of_python() -> None:
    text = (GENERATED / "sm90.h").read_text()
    assert f"kMaxExperts = {kernel_facts.Sm90.MAX_EXPERTS};" in text
    assert f"kMaxSlots = {kernel_facts.Sm90Decode.MAX_SLOTS};" in text
    assert "namespace moeq::sm90::w4a8" in text and f"kMaxK = {kernel_facts.Sm90W4a8.MAX_K};" in text
    sizes = ", ".join(str(f.tile_bytes) for f in kernel_facts.SM90_FORMATS.values())
    assert f"kTileScaleBytes[] = {{{sizes}}};" in text


def test_activations_with_a_gate_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "activation < Activation::kSiluNoMul" in headers.activations()
    monkeypatch.setattr(headers, "ACTIVATIONS", dict(reversed(ACTIVATIONS.items())))
    with pytest.raises(ValueError, match="those with a gate first"):
        headers.activations()


def test_arguments_follow_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped fields of a call are swapped in the schema and in the struct alike."""
    text = headers.calls()
    assert "Tensor w13;\n  OptionalTensor w13_scale;" in text and "Tensor w13, Tensor? w13_scale," in text
    order = [{"w13": "w2", "w2": "w13"}.get(name, name) for name in KERNEL_FIELDS]
    monkeypatch.setattr(headers, "KERNEL_FIELDS", tuple(order))
    swapped = headers.calls()
    assert "Tensor w2;\n  OptionalTensor w13_scale;" in swapped and "Tensor w2, Tensor? w13_scale," in swapped


def test_what_kernels_get_of_a_call() -> None:
    call = ExpertsCall(*FIELDS)  # each value is its name
    assert for_kernels(call) == KERNEL_FIELDS
    changed = for_kernels_with("w13_scale", "g2_alphas")((*call, 1, 2))
    assert [b for a, b in zip(KERNEL_FIELDS, changed, strict=True) if a != b] == [1, 2]
    assert changed[KERNEL_FIELDS.index("w13_scale")] == 1 and changed[KERNEL_FIELDS.index("g2_alphas")] == 2
    with pytest.raises(KeyError, match="backend"):
        for_kernels_with("w13_scale", "backend")
    assert set(KERNEL_FIELDS) < set(INDEX)


@pytest.mark.parametrize("op", kernel_facts.OWN_ARGUMENTS)
def test_compiled_ops_have_these_arguments(op: str) -> None:
    if not hasattr(torch.ops.moeq_C, op):
        pytest.skip(f"not compiled: {extension.cpu_extension_reason() or extension.cuda_extension_reason()}")
    schema = getattr(torch.ops.moeq_C, op).default._schema
    assert tuple(a.name for a in schema.arguments) == kernel_facts.arguments_of(op)

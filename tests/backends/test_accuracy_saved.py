"""The accuracy that was asked for stays with prepared weights and their files."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from every_layer import prepared_here
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.problem import ACCURACIES


@pytest.mark.parametrize("wanted", ACCURACIES)
def test_prepared_weights_keep_it(wanted: str, tmp_path: Path) -> None:
    raw = make_raw(Case("int8"))
    w = moe.prepare(raw, accuracy=wanted)
    w.save(tmp_path / "layer.safetensors")
    loaded = moe.PreparedWeights.load(tmp_path / "layer.safetensors")
    again = moe.prepare(moe.restore(w), backend=w.requested, **w.options())
    for each in (w, loaded, again, w.to("meta"), w.update_(make_raw(Case("int8", seed=3)))):
        assert (each.accuracy, each.problem.accuracy, each.options()["accuracy"]) == (wanted,) * 3
        assert moe.explain(each).problem.accuracy == wanted
    assert moe.explain(raw, accuracy=wanted).problem == moe.explain(w).problem
    assert moe.prepare(raw).accuracy == "standard"


def _without_accuracy(w: moe.PreparedWeights, **changes: Any) -> moe.PreparedWeights:
    """As an earlier version wrote it."""
    said = json.loads(urllib.parse.unquote(w.posed)) | changes
    if not changes:
        del said["accuracy"]
    return dataclasses.replace(w, posed=urllib.parse.quote(json.dumps(said)))


@pytest.mark.parametrize("backend", ["triton", "triton_fp8"])
def test_a_file_of_before_there_was_a_choice_is_as_accurate_as_its_backend(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that was taken unasked was strict: preparing such weights again gets nothing that is farther off."""
    case = Case("fp8_block", "fp8", hidden=256, inter=256)
    w = prepared_here(backend, case, make_raw(case), monkeypatch)
    old = _without_accuracy(w)
    old.save(tmp_path / "layer.safetensors")
    wanted = BACKENDS[backend].accuracy
    for each in (old, moe.PreparedWeights.load(tmp_path / "layer.safetensors")):
        assert each.accuracy == each.options()["accuracy"] == wanted == each.problem.accuracy
        assert moe.explain(each).chosen == backend


@pytest.mark.parametrize("value", ["exact", None, 3])
def test_a_file_with_another_word_is_refused(value: Any, tmp_path: Path) -> None:
    _without_accuracy(moe.prepare(make_raw(Case())), accuracy=value).save(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"layer.safetensors: posed .*accuracy must be"):
        moe.PreparedWeights.load(tmp_path / "layer.safetensors")

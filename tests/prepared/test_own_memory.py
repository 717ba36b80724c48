"""What prepare and restore return is memory of its own: writing into one side changes nothing on the other."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from every_layer import layer_of, prepared_here, raw_of
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemes import SCHEMES


def _storages(weights: moe.RawWeights | moe.PreparedWeights) -> dict[int, str]:
    return {t.untyped_storage().data_ptr(): name for name, t in weights.tensors().items()}


def _copied(raw: moe.RawWeights) -> moe.RawWeights:
    return dataclasses.replace(raw, **{name: t.clone() for name, t in raw.tensors().items()})


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"cuda_sm90_folded"}))  # folded weights are not restored
def test_an_update_leaves_what_was_restored_and_what_was_prepared(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer for scheme in SCHEMES if (layer := layer_of(backend, scheme))]
    assert layers
    for case, zero in layers:
        _update_and_compare(backend, case, zero, monkeypatch)


def _update_and_compare(backend: str, case: Case, zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, new = raw_of(case, zero), raw_of(case, zero, seed=1)
    given, wanted = _copied(raw), _copied(new)
    w = prepared_here(backend, case, raw, monkeypatch)
    back = moe.restore(w)
    assert back.equal(given)
    for one, other in ((raw, w), (back, w), (back, raw)):
        shared = _storages(one).keys() & _storages(other).keys()
        assert not shared, (case.scheme, [(_storages(one)[s], _storages(other)[s]) for s in shared])
    w.update_(new)
    assert raw.equal(given), (case.scheme, "prepare's argument")
    assert back.equal(given), (case.scheme, "what restore returned before")
    assert new.equal(wanted) and moe.restore(w).equal(wanted)


def test_every_backend_and_scheme_has_such_a_layer() -> None:
    covered = {pair for pair in product(BACKENDS, SCHEMES) if layer_of(*pair)}
    assert {name for name, _ in covered} == BACKENDS.keys()
    for backend in ("reference", "cpu", "triton"):
        assert {scheme for name, scheme in covered if name == backend} == SCHEMES.keys()
    assert all(layer_of("reference", scheme)[0].bias for scheme in SCHEMES)
    assert all(layer_of("reference", scheme)[1] for scheme in ("int4", "int8"))


def test_rows_that_are_views_of_a_larger_tensor_are_copied() -> None:
    """A rank's share is a view: another address than its tensor's, the same memory."""
    case = Case(experts=6, bias=True, input_scale="tensor")
    raw, new = (make_raw(dataclasses.replace(case, seed=seed)) for seed in (0, 1))
    given = _copied(raw)
    shares = [dataclasses.replace(r, **{n: t[2:4] for n, t in r.tensors().items() if t.ndim}) for r in (raw, new)]
    w = moe.prepare(shares[0], backend="reference", act_format="nvfp4")
    assert not _storages(raw).keys() & _storages(w).keys()
    w.update_(shares[1])
    assert raw.equal(given) and moe.restore(w).equal(shares[1])

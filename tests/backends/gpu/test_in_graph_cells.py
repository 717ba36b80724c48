"""The in-graph matrix holds all that the registry offers, and its judge sees a layer that reads too early. No GPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gpu_layers
import in_graph_cells
import pytest
import torch
from gpu_layers import FORMATS, GPU_BACKENDS, Format
from in_graph import LAYER, Inputs, Pair, judge, make_pair, replay_pair, sizes_for
from in_graph_cells import FORMS, FRONTS, GATHERED, GATHERED_TOKENS, TOKENS, Cell, cells_of, layers, write_cell

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.sm90.choice import gathered_max_tokens, may_gather
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.core.schemes import SCHEMES

CPU = Format("cpu", "nvfp4", "nvfp4", "none", "exact")
# Layers that a backend might ask for: sizes, and what shares a scale of weights.
SIZES = ((64, 64), (256, 256), (512, 256), (2880, 704), (7168, 2048))


def offered(backend: str) -> set[tuple[str, str, str]]:
    """(scheme, activation format, weight policy) of all that a GPU backend says it runs, at whatever size."""
    found = set()
    for scheme in SCHEMES.values():
        for act, policy in itertools.product(scheme.act_formats, scheme.policies):
            if policy != "exact" and act != "fp8":
                continue
            for capability, (hidden, inter) in itertools.product(((8, 0), (9, 0)), SIZES):
                problem = moe.Problem(
                    scheme.name, act, device="cuda", capability=capability, num_experts=8, hidden_size=hidden,
                    intermediate_size=inter, weight_policy=policy,
                )  # fmt: skip
                if BACKENDS[backend].fits_anywhere(problem):
                    found.add((scheme.name, act, policy))
    return found


def missing() -> list[tuple[str, ...]]:
    """Combinations that a backend offers, and "auto" with them, that the matrix lacks."""
    have = {
        (c.fmt.backend, c.fmt.scheme, c.fmt.act_format, c.fmt.weight_policy, c.tokens, c.form, c.front)
        for layer in layers()
        for c in cells_of(*layer)
    }
    wanted = [
        (name, *kind, m, form, front)
        for backend in GPU_BACKENDS
        for kind in sorted(offered(backend))
        for name in (backend, "auto")
        for m, form, front in itertools.product(TOKENS, FORMS, FRONTS)
    ]
    return [cell for cell in wanted if cell not in have]


def test_the_matrix_holds_what_the_registry_offers() -> None:
    assert not missing()
    assert {f.backend for f in FORMATS} == set(GPU_BACKENDS)
    assert set(TOKENS) >= {1, 2, 5, 40} and set(FORMS) == {"monolithic", "routed"}
    assert set(FRONTS) >= {"copy", "gemm", "route", "layer", "early"}


def test_what_users_get_comes_first() -> None:
    """4-bit weights with every activation format are among the first: a record's time may end before the last ones."""
    order = [(f.backend, f.scheme, f.act_format, m) for f, m in layers()]
    backends = [backend for backend, *_ in order]
    assert "auto" not in backends[backends.index(next(b for b in backends if b != "auto")) :]
    wanted = itertools.product((("nvfp4", "fp8"), ("mxfp4", "fp8"), ("mxfp4", "mxfp8")), TOKENS)
    last = max(order.index(("auto", *kind, m)) for kind, m in wanted)
    assert last < len(order) / 8, f"{last} of {len(order)}"


def test_the_matrix_has_rows_that_are_gathered() -> None:
    """As the default and by name; other numbers of tokens have no more experts than before."""
    sizes = sizes_for(GATHERED_TOKENS)
    most = gathered_max_tokens(sizes.experts, sizes.top_k, sizes.hidden, sizes.inter, sizes.experts)
    assert Sm90Few.MAX_TOKENS < GATHERED_TOKENS <= most
    have = {(fmt.backend, fmt.scheme) for fmt, m in layers() if m == GATHERED_TOKENS}
    assert have == set(GATHERED) and all(may_gather(s, "none", sizes.activation, sizes.bias, False) for _, s in have)
    assert {sizes_for(m) for _, m in layers() if m != GATHERED_TOKENS} == {LAYER}


def test_a_format_that_the_matrix_lacks_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = tuple(f for f in FORMATS if (f.backend, f.scheme) != ("triton", "none"))
    monkeypatch.setattr(in_graph_cells, "FORMATS", fewer)
    assert ("triton", "none", "none", "exact", 1, "routed", "route") in missing()


def test_a_new_backend_is_in_the_list_of_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU_BACKENDS and FORMATS follow the registry: only backends with tests of their own are left out, by name."""
    assert set(GPU_BACKENDS) | set(gpu_layers._OTHERS) == set(BACKENDS)
    monkeypatch.setattr(gpu_layers, "GPU_BACKENDS", (*GPU_BACKENDS, "reference"))
    assert any(f.backend == "reference" for f in gpu_layers._formats())


class StaleIds:
    """A layer that reads what its inputs were when it was called before, as one does that does not wait."""

    def __init__(self, layer: object, part: str):
        self.layer, self.part, self.before = layer, part, None

    def __getattr__(self, name: str) -> object:
        return getattr(self.layer, name)

    def __call__(self, form: str, inputs: Inputs) -> torch.Tensor:
        seen = inputs if self.before is None else inputs._replace(**{self.part: getattr(self.before, self.part)})
        self.before = inputs
        return self.layer(form, seen)  # type: ignore[operator]


@pytest.mark.parametrize("tokens", (1, 5, GATHERED_TOKENS))
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_judge_passes_a_right_layer(form: str, front: str, tokens: int) -> None:
    pair = make_pair(CPU, sizes_for(tokens), device="cpu")
    verdict = judge(pair, CPU, form, replay_pair(pair, tokens, form, front, replays=2))
    assert verdict.passed, verdict
    assert verdict.worst < verdict.bound


@pytest.mark.parametrize(("form", "part"), (("routed", "ids"), ("routed", "x"), ("monolithic", "logits")))
@pytest.mark.parametrize("at", (0, 1))
def test_the_judge_sees_a_layer_that_reads_too_early(form: str, part: str, at: int) -> None:
    right = make_pair(CPU, device="cpu")
    layers_ = [right.first, right.second]
    layers_[at] = StaleIds(layers_[at], part)  # type: ignore[call-overload]
    pair = Pair(*layers_, right.other)
    verdict = judge(pair, CPU, form, replay_pair(pair, 1, form, "copy", replays=4))
    assert not verdict.passed
    assert verdict.right < 4 and verdict.repeated < 4, verdict


def test_cells_are_written_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(CPU, 1, "routed", "copy")
    monkeypatch.delenv("MOEQ_RECORD", raising=False)
    write_cell(cell, "cpu", {"right": 12})
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MOEQ_RECORD", str(tmp_path))
    for _ in range(2):
        write_cell(cell, "cpu", {"right": 12})
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == 2 and lines[0]["front"] == "copy" and lines[0]["right"] == 12

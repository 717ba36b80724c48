"""The in-graph matrix on a GPU: every format of every backend, behind every kind of kernel. See in_graph.py."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from gpu_layers import Format, needs_cuda
from in_graph import judge, make_pair, replay_pair, sizes_for
from in_graph_cells import cells_of, layers, write_cell

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize(("fmt", "tokens"), [pytest.param(*layer, id=f"{layer[0]}-{layer[1]}") for layer in layers()])
def test_every_replay_is_right(fmt: Format, tokens: int) -> None:
    pair = make_pair(fmt, sizes_for(tokens))
    wrong = []
    for cell in cells_of(fmt, tokens):
        verdict = judge(pair, fmt, cell.form, replay_pair(pair, tokens, cell.form, cell.front))
        write_cell(cell, pair.first.w.backend, asdict(verdict))
        if not verdict.passed:
            wrong.append(f"{cell.form} behind {cell.front}: {verdict}")
    assert not wrong, "\n".join(wrong)

"""Which kernel of `cuda_sm90` a number of tokens gets: rules, files of tuned kernels, and what explain says of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_cases import make_call

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90 import choice
from torch_moe_ops.commands.tune import kernels, layers
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.tuning import tuned, tuned_kernels
from torch_moe_ops.tuning.tuned_kernels import KERNELS, Switches

DEVICE = "NVIDIA H200 (SXM)"
KEY = tuned.Key("nvfp4", "none", 128, 8, 2048, 768)
MINE: Switches = (("decode", 20), ("slim", 300), ("wide", None))
THEIRS: Switches = (("decode", 9), ("narrow", 100), ("wide", None))
RULES: Switches = (("decode", 14), ("slim", 384), ("narrow", 1280), ("wide", None))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A current CUDA device of the name DEVICE, and no tables but those of the test."""
    kept = dict(tuned_kernels.TABLE), dict(tuned_kernels.SHIPPED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: DEVICE)
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", tmp_path / "shipped")
    _load(tmp_path / "nothing")
    yield
    for table, problems in zip((tuned_kernels.TABLE, tuned_kernels.SHIPPED), kept, strict=True):
        table.clear()
        table.update(problems)
    _forget()


def _forget() -> None:
    for cached in (tuned_kernels.lookup, choice.choice_of, tuned.name_of_device):
        cached.cache_clear()


def _load(where: Path) -> None:
    tuned_kernels.load(where)
    tuned.name_of_device.cache_clear()


def _choice(**changes: Any) -> choice.Choice:
    ranks = changes.pop("ranks", 1)
    key = KEY._replace(**changes)
    return choice.choice_of(0, *key, ranks * key.num_experts)


def _kernels_of(found: choice.Choice) -> Switches:
    return tuple((KERNELS[k], most) for k, most in zip(found.kernels, (*found.bounds, None), strict=True))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 8, 2048, 768), RULES),
        ((256, 8, 7168, 2048), (("decode", 56), ("slim", 768), ("narrow", 2560), ("wide", None))),
        ((8, 2, 4096, 14336), (("decode", 14), ("narrow", 320), ("wide", None))),
        ((128, 1, 2048, 768), (("decode", 14), ("narrow", 47), ("slim", 3072), ("narrow", 10240), ("wide", None))),
        ((1, 1, 64, 64), (("decode", 14), ("narrow", 80), ("wide", None))),
        ((8, 32, 64, 64), (("decode", 14), ("narrow", 20), ("wide", None))),
        ((512, 256, 64, 64), (("decode", 8), ("slim", 48), ("narrow", 160), ("wide", None))),
        ((32, 4, 2880, 2880), (("decode", 14), ("slim", 192), ("narrow", 640), ("wide", None))),
        ((40, 8, 2048, 768), (("decode", 14), ("narrow", 400), ("wide", None))),
    ],
)
def test_rules(sizes: tuple[int, int, int, int], expected: Switches) -> None:
    assert choice.rules(*sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # The same tokens an expert as on one rank, but for decode, whose bound is that of the experts here.
        ((256, 8, 7168, 2048, 32), (("decode", 14), ("slim", 768), ("narrow", 2560), ("wide", None))),
        # 16 experts are less than three blocks a multiprocessor: no slim tiles.
        ((128, 8, 2048, 768, 16), (("decode", 14), ("narrow", 1280), ("wide", None))),
        # Slim tiles want 48 experts hit: an eighth of 384 slots.
        (
            (896, 1, 2048, 768, 112),
            (("decode", 14), ("narrow", 383), ("slim", 21504), ("narrow", 71680), ("wide", None)),
        ),
        ((8, 2, 4096, 14336, 2), (("decode", 14), ("narrow", 320), ("wide", None))),
        ((128, 4, 2880, 2880, 32), (("decode", 14), ("narrow", 31), ("slim", 768), ("narrow", 2560), ("wide", None))),
    ],
)
def test_rules_of_a_rank(sizes: tuple[int, int, int, int, int], expected: Switches) -> None:
    assert choice.rules(*sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 8, 2048), (("decode", 8), ("slim", 384), ("narrow", 1280), ("wide", None))),
        # Eight experts are less than three blocks a multiprocessor: no slim tiles.
        ((8, 2, 4096), (("decode", 8), ("narrow", 320), ("wide", None))),
        ((128, 8, 2048, 16), (("decode", 8), ("narrow", 1280), ("wide", None))),
        ((512, 22, 1024), (("decode", 5), ("slim", 558), ("narrow", 1861), ("wide", None))),
    ],
)
def test_rules_of_weights_of_8_bits(sizes: tuple[int, ...], expected: Switches) -> None:
    assert choice.byte_rules(*sizes) == expected


def test_rules_are_switches_that_a_file_may_hold() -> None:
    for experts in (1, 2, 8, 60, 128, 512, 1024):
        for top_k in (1, 2, 8, 22, 32):
            for hidden, inter in ((64, 64), (2048, 768), (2880, 2880), (7168, 2048), (16384, 53248)):
                for ranks in (1, 2, 5, 64):
                    found = choice.rules(ranks * experts, top_k, hidden, inter, experts)
                    assert tuned_kernels.check(found, top_k) == found


def test_a_call_gets_the_first_kernel_that_takes_its_tokens() -> None:
    names = {tokens: KERNELS[_choice().kernel(tokens)] for tokens in (0, 1, 14, 15, 384, 385, 1280, 1281, 10**6)}
    assert names == {
        0: "decode", 1: "decode", 14: "decode", 15: "slim", 384: "slim", 385: "narrow", 1280: "narrow", 1281: "wide",
        10**6: "wide",
    }  # fmt: skip


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    other = KEY._replace(top_k=4)
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    path = tuned_kernels.save(DEVICE, other, THEIRS, tmp_path)
    assert path.name == "nvidia-h200-sxm.json"
    assert tuned_kernels.read(path) == (DEVICE, {KEY: MINE, other: THEIRS})
    tuned_kernels.save(DEVICE, KEY, THEIRS, tmp_path)
    assert tuned_kernels.read(path)[1] == {KEY: THEIRS, other: THEIRS}
    path.write_text("{")
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    assert tuned_kernels.read(path)[1] == {KEY: MINE}


def test_a_users_table_comes_first_then_the_library_s_then_rules(tmp_path: Path) -> None:
    shipped = tuned.SHIPPED_FOLDER / tuned_kernels.FOLDER
    path = tuned_kernels.save(DEVICE, KEY, THEIRS, shipped)
    path.write_text(path.read_text().replace(f'"library": "{moe.__version__}"', '"library": "0.0.0"'))
    assert _kernels_of(_choice()) == RULES
    _load(tmp_path / "nothing")
    assert (_kernels_of(_choice()), _choice().source) == (THEIRS, "the library's table")
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path / "mine")
    tuned_kernels.save("another device", KEY._replace(top_k=4), MINE, tmp_path / "mine")
    _load(tmp_path / "mine")
    assert (_kernels_of(_choice()), _choice().source) == (MINE, "a table made here")
    for changes in ({"top_k": 4}, {"hidden_size": 1024}, {"scheme": "mxfp4"}):
        assert _choice(**changes).source == "rules", changes
    assert _kernels_of(_choice(act_format="nvfp4")) == MINE, "16-bit activations stand in for others"


def test_a_rank_has_the_kernels_of_its_experts_at_as_many_tokens_each(tmp_path: Path) -> None:
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    _load(tmp_path)
    assert _kernels_of(_choice(ranks=4)) == (("decode", 20), ("slim", 1200), ("wide", None))
    assert _choice(ranks=4).source == "a table made here"
    eighth = _choice(num_experts=16, ranks=8)
    assert eighth.source == "rules", "the table of all experts has another division of work"
    tuned_kernels.save(DEVICE, KEY, (("slim", 100), ("decode", 120), ("wide", None)), tmp_path)
    _load(tmp_path)
    assert _kernels_of(_choice(ranks=4)) == (("slim", 400), ("wide", None)), "decode ends at 120"


def _gathered(key: tuned.Key, ranks: int) -> int:
    return choice.gathered_of(key, ranks * key.num_experts)


def test_rows_are_gathered_where_that_is_the_best_kernel() -> None:
    """Up to two pairs an expert in the mean and a limit of all pairs' weights, where the kernel surely takes them."""
    share = KEY._replace(num_experts=32)
    assert _gathered(KEY, 1) == _gathered(share, 4) == 32
    assert _gathered(share._replace(top_k=10), 4) == 25, "256 slots, as many as two pairs an expert"
    assert _gathered(KEY._replace(num_experts=16, top_k=4), 2) == 16, "64 pairs of 32 experts"
    assert _gathered(share._replace(hidden_size=8192), 4) == 30, "the exchange"
    assert _gathered(share._replace(intermediate_size=14336), 4) == 0, "an SM's memory"
    assert _gathered(share._replace(num_experts=513, top_k=32), 4) == 0, "experts that one block sorts"
    assert _gathered(KEY._replace(top_k=22), 1) == 11
    large = KEY._replace(num_experts=256, hidden_size=7168, intermediate_size=2048)
    assert _gathered(large, 1) == 0, "work"
    assert _gathered(large._replace(num_experts=64), 4) == 13
    assert _gathered(large._replace(num_experts=32), 8) == 27
    assert _gathered(large._replace(num_experts=32, act_format="fp8"), 8) == 23, "room of the exchange"
    assert _gathered(KEY._replace(num_experts=160, hidden_size=5120, intermediate_size=1536), 1) == 0, "eight or fewer"


def test_the_kernel_of_rows_that_are_gathered_comes_before_what_tables_say(tmp_path: Path) -> None:
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    _load(tmp_path)
    with_rows, without = (choice.choice_of(0, *KEY, KEY.num_experts, gathers) for gathers in (True, False))
    assert with_rows.kernel(1) == with_rows.kernel(32) == Sm90Few.GATHERED_KERNEL
    assert [with_rows.kernel(33 + n) for n in range(3000)] == [without.kernel(33 + n) for n in range(3000)]
    assert without.kernel(32) < len(tuned_kernels.KERNELS)


@pytest.mark.parametrize(
    ("changes", "gathers"),
    [
        ({}, True),
        ({"scheme": "mxfp4", "activation": "swigluoai"}, True),
        ({"scheme": "mxint4"}, True),
        ({"scheme": "int4"}, True),
        ({"scheme": "mxfp8"}, False),
        ({"act_format": "fp8"}, True),
        ({"act_format": "mxfp8"}, False),
        ({"act_format": "nvfp4"}, False),
        ({"activation": "gelu"}, False),
        ({"has_bias": True}, False),
        ({"weight_on_input": True}, False),
    ],
)
def test_which_layers_gather(changes: dict[str, Any], gathers: bool) -> None:
    plain = {"scheme": "nvfp4", "act_format": "none", "activation": "silu", "has_bias": False, "weight_on_input": False}
    assert choice.may_gather(**plain | changes) is gathers


@pytest.mark.parametrize(
    ("given", "offset", "bound"), [(0, 0, 320), (8, 0, 320), (32, 0, 1280), (32, 8, 1280), (0, 24, 1280)]
)
def test_a_call_says_how_many_experts_all_ranks_have(
    given: int, offset: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(cuda_sm90, "run_kernel", lambda call, out, kernel, *router: chosen.append(KERNELS[kernel]))
    for tokens in (bound, bound + 1):
        call = make_call(tokens=tokens, top_k=2, experts=8, hidden=64, inter=64, num_experts=given,
                         local_expert_offset=offset)  # fmt: skip
        cuda_sm90.run(call._replace(w2=call.w2.new_empty(8, 1, 1, 2048)), call.hidden_states.new_empty(tokens, 64))
    assert chosen == ["narrow", "wide"]


def test_a_user_s_entries_of_another_version_count_for_nothing(tmp_path: Path) -> None:
    path = tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    path.write_text(path.read_text().replace(f'"library": "{moe.__version__}"', '"library": "0.0.0"'))
    _load(tmp_path)
    assert _choice().source == "rules"


def test_layers_that_are_padded_alike_are_one(tmp_path: Path) -> None:
    tuned_kernels.save(DEVICE, KEY._replace(intermediate_size=720), MINE, tmp_path)
    _load(tmp_path)
    for inter in (705, 720, 768):  # a call knows the padded size only
        assert _kernels_of(_choice(intermediate_size=inter)) == MINE


def test_the_folder_is_beside_the_tile_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEQ_TUNE_DIR", str(tmp_path))
    assert tuned_kernels.folder() == tmp_path / "cuda_sm90"
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path / "cuda_sm90")
    tuned.load()  # does not take it for its own
    tuned_kernels.load()
    _forget()
    assert _kernels_of(_choice()) == MINE
    monkeypatch.setenv("MOEQ_TUNE_DIR", "")
    assert tuned_kernels.folder() is None


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ([], "pairs"),
        ([["decode", 4, 5], ["wide", None]], "pairs"),
        (["decode", "wide"], "pairs"),
        ([["decode", 4], ["huge", None]], "must be of decode, slim"),
        ([["decode", 4], ["wide", 100]], "null at the end"),
        ([["decode", 4], ["slim", None], ["wide", None]], "positive"),
        ([["decode", 0], ["wide", None]], "positive"),
        ([["decode", True], ["wide", None]], "positive"),
        ([["decode", 1.5], ["wide", None]], "positive"),
        ([["decode", 40], ["slim", 30], ["wide", None]], "must ascend"),
        ([["decode", 40], ["slim", 40], ["wide", None]], "must ascend"),
        ([["decode", 257], ["wide", None]], "decode must end at 256 tokens with top_k 8, got 257"),
        ([["decode", None]], "decode must end at 256"),
    ],
)
def test_a_damaged_table_is_ignored_with_a_warning(tmp_path: Path, switches: Any, message: str) -> None:
    path = tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    data = json.loads(path.read_text())
    data["layers"][0]["kernels"] = switches
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        tuned_kernels.read(path)
    with pytest.warns(UserWarning, match=rf"tuned kernels are ignored: .*{path.name}"):
        tuned_kernels.load(tmp_path)
    assert _choice().source == "rules"


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "[" * 100000, '{"format": 2}', '{"format": 1, "device": 3}'])
def test_a_file_of_something_else_is_ignored_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.warns(UserWarning, match="tuned kernels are ignored"):
        tuned_kernels.load(tmp_path)
    assert tuned_kernels.TABLE == {}


def test_explain_says_which_kernel_and_why(tmp_path: Path) -> None:
    problem = moe.Problem("nvfp4", "none", device="cuda", capability=(9, 0), num_experts=128, hidden_size=2048,
                          intermediate_size=768, top_k=8)  # fmt: skip
    tail = "slim tiles of the prefill kernel up to 384, narrow tiles of the prefill kernel up to 1280, "
    few = "(without grid barriers up to 8, while its buffers fit an SM)"
    gathers = "decode kernel that gathers rows up to 32 tokens, slim tiles of the prefill kernel up to"
    tail = f"{tail}wide tiles of the prefill kernel beyond (by rules)"
    assert moe.explain(problem).notes["cuda_sm90"] == f"decode kernel that gathers rows up to 32 tokens, {tail}"
    biased = dataclasses.replace(problem, has_bias=True)
    assert moe.explain(biased).notes["cuda_sm90"] == f"decode kernel up to 14 tokens {few}, {tail}"
    many = dataclasses.replace(problem, num_experts=256, num_local_experts=64, hidden_size=7168, intermediate_size=2048)
    note = moe.explain(many).notes["cuda_sm90"]
    assert note.startswith("decode kernel that gathers rows up to 13 tokens, decode kernel up to 14 tokens, slim tiles")
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    _load(tmp_path)
    assert moe.explain(problem).notes["cuda_sm90"].startswith(f"{gathers} 300")
    assert moe.explain(biased).notes["cuda_sm90"].startswith(f"decode kernel up to 20 tokens {few}, slim tiles of")
    assert moe.explain(problem).notes["cuda_sm90"].endswith("(by a table made here)")


def test_explain_says_which_kernel_a_rank_gets(tmp_path: Path) -> None:
    problem = moe.Problem("nvfp4", "none", device="cuda", capability=(9, 0), num_experts=512, num_local_experts=128,
                          hidden_size=2048, intermediate_size=768, top_k=8)  # fmt: skip
    note = moe.explain(problem).notes["cuda_sm90"]
    assert note.startswith(
        "decode kernel that gathers rows up to 32 tokens, slim tiles of the prefill kernel up to 1536, "
    )
    biased = moe.explain(dataclasses.replace(problem, has_bias=True)).notes["cuda_sm90"]
    assert biased.startswith("decode kernel up to 14 tokens (without grid barriers up to 8, ")
    assert ", slim tiles of the prefill kernel up to 1536, narrow tiles of the prefill kernel up to 5120, " in note
    assert note.endswith("beyond (by rules, for 128 of 512 experts)")
    tuned_kernels.save(DEVICE, KEY, MINE, tmp_path)
    _load(tmp_path)
    note = moe.explain(problem).notes["cuda_sm90"]
    assert "rows up to 32 tokens, slim tiles of the prefill kernel up to 1200, " in note
    assert note.endswith("(by a table made here, for 128 of 512 experts)")
    note = moe.explain(dataclasses.replace(problem, top_k=None)).notes["cuda_sm90"]
    assert note.startswith("decode kernel up to 14 tokens, ")
    assert note.endswith(", where no table has the layer, for 128 of 512 experts")


def test_the_library_s_own_tables_can_be_read() -> None:
    paths = sorted((Path(tuned.__file__).parent / "tile_tables" / "cuda_sm90").glob("*.json"))
    assert paths
    for path in paths:
        device, found = tuned_kernels.read(path, any_library=True)
        assert found
        assert path == tuned.file_of(device, path.parent)


def test_measured_times_become_switches() -> None:
    times = {
        8: {"decode": 50.0, "slim": 60.0},
        16: {"decode": 80.0, "slim": 75.0},
        64: {"slim": 100.0, "narrow": 104.0},
        512: {"slim": 150.0, "narrow": 140.0, "wide": 160.0},
        1024: {"narrow": 200.0, "wide": 190.0},
        2048: {"narrow": 400.0, "wide": 320.0},
    }
    found = kernels.switches_of(times, RULES)
    assert [name for name, _ in found] == ["decode", "slim", "narrow", "wide"]
    bounds = [most for _, most in found]
    assert 8 <= bounds[0] < 16 and 64 <= bounds[1] < 512 and 512 <= bounds[2] < 1024  # type: ignore[operator]
    crossing = 8 * 2 ** (1 / (1 + (80 / 75 - 1) / (60 / 50 - 1)))
    assert abs(bounds[0] - crossing) < 1  # type: ignore[operator]
    assert tuned_kernels.check(found, 8) == found


def test_noise_makes_no_switch_and_rules_go_on_where_nothing_was_timed() -> None:
    times = {m: {"slim": 100.0 + m, "narrow": (100.0 + m) * (0.995 if m == 64 else 1.02)} for m in (32, 64, 128)}
    assert kernels.switches_of(times, RULES) == (("slim", 384), ("narrow", 1280), ("wide", None))
    assert kernels.switches_of({8: {"decode": 5.0, "slim": 6.0}}, RULES) == RULES
    late = {512: {"slim": 5.0, "narrow": 6.0}}
    assert kernels.switches_of(late, RULES) == (("slim", 512), ("narrow", 1280), ("wide", None))
    assert kernels.switches_of({900: {"narrow": 6.0, "wide": 5.0}}, RULES) == (("wide", None),)
    latest = {2000: {"slim": 5.0, "narrow": 6.0}}  # beyond what the rules have narrow for
    assert kernels.switches_of(latest, RULES) == (("slim", 2000), ("wide", None))


def test_what_is_hopeless_is_not_timed() -> None:
    layer = layers.of_shape("qwen3_30b", "nvfp4", "none")
    assert kernels.candidates(8, layer, {}) == ["decode", "slim"]
    assert kernels.candidates(16, layer, {8: {"decode": 8.0, "slim": 6.0}}) == ["slim", "narrow"]
    assert kernels.candidates(512, layer, {}) == ["slim", "narrow", "wide"], "decode takes 2048 slots"
    assert kernels.candidates(1024, layer, {512: {"slim": 9.0, "narrow": 6.0}}) == ["narrow", "wide"]
    assert "slim" in kernels.candidates(4, layer, {1: {"decode": 5.0, "slim": 9.0}}), "it may come"

"""accuracy="strict" and "standard": what auto takes in either class, from what was measured and from nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from config_samples import layer_config
from installed_backends import install_everything
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.measured import records, speed
from torch_moe_ops.backends.native import auto_act_format
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES

NOT_STRICT = {"triton_fp8", "cuda_sm90_fp8", "cuda_sm90_int4"}
FIELD = {"flashinfer_trtllm", "flashinfer_cutlass"}  # other projects' kernels, which round what their authors chose
FP8 = moe.Problem(
    "fp8_block", "fp8", device="cuda", capability=(9, 0), num_experts=128, hidden_size=2048, intermediate_size=768
)
NEAR = {
    "scheme": "fp8_block", "act_format": "fp8", "weight_policy": "exact", "weight_scales": None, "activation": "silu",
    "layers": 6,
    "l2": [2e-3, 6e-3], "row": [2e-3, 9e-3], "field": "vLLM's Triton kernel", "ratio": 0.5,
}  # fmt: skip
TIMES = {
    "scheme": "fp8_block", "act_format": "fp8", "weight_scales": None, "num_experts": 128, "top_k": 8,
    "hidden_size": 2048, "intermediate_size": 768,
    "us": {"cuda_sm90": {"1": 20.0, "64": 100.0}, "triton_fp8": {"1": 18.0, "64": 80.0}, "cuda_sm90_fp8": {"1": 30.0, "64": 50.0}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_timings_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MIN_TOKENS", 1)


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install_everything(monkeypatch)


def results(
    monkeypatch: pytest.MonkeyPatch, distances: list[dict[str, Any]], times: list[dict[str, Any]], **changes: Any
) -> None:
    """Put other measurements in the place of the library's."""
    data = {"format": 1, "device": "NVIDIA H200", "capability": [9, 0], "distances": distances, "times": times}
    monkeypatch.setattr(records, "measured", lambda: data | changes)


def near(*backends: str, **changes: Any) -> list[dict[str, Any]]:
    return [NEAR | {"backend": name} | changes for name in backends]


def problems() -> Iterator[moe.Problem]:
    """Every format on several devices."""
    for scheme in SCHEMES.values():
        for act in scheme.act_formats:
            for policy in scheme.policies if act == "fp8" else ("exact",):
                for device, capability in (
                    ("cpu", None),
                    ("cuda", (8, 0)),
                    ("cuda", (8, 9)),
                    ("cuda", (9, 0)),
                    ("cuda", (10, 0)),
                ):
                    yield moe.Problem(
                        scheme.name, act, device=device, capability=capability, num_experts=8, hidden_size=256,
                        intermediate_size=256, weight_policy=policy,
                    )  # fmt: skip


def _everything_measured() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As if every backend were as near as could be, and those that are not strict the faster ones."""
    formats = [(s.name, act, policy) for s in SCHEMES.values() for act in s.act_formats for policy in s.policies]
    names = ("scheme", "act_format", "weight_policy")
    distances = [entry for found in formats for entry in near(*BACKENDS, **dict(zip(names, found, strict=True)))]
    us = {name: {"1": 1.0 if backend.accuracy == "standard" else 2.0} for name, backend in BACKENDS.items()}
    times = [
        TIMES | {"scheme": scheme, "act_format": act, "num_experts": n, "us": us}
        for scheme, act, _ in formats
        for n in (8, 16)
    ]
    return distances, times


@pytest.mark.parametrize(
    "problem",
    list(problems()),
    ids=lambda p: f"{p.scheme}-{p.act_format}-{p.weight_policy}-{p.device}{p.capability or ''}",
)
def test_what_auto_takes_in_either_class(problem: moe.Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict takes nothing else, whatever was measured; standard what strict takes, or what is near and faster."""
    for measured in (([], []), _everything_measured()):
        results(monkeypatch, *measured)
        strict = moe.explain(dataclasses.replace(problem, accuracy="strict"))
        standard = moe.explain(problem)
        assert strict.chosen is not None and BACKENDS[strict.chosen].accuracy == "strict"
        assert all(strict.against[name] for name in NOT_STRICT | FIELD), "each says why not"
        assert {backend.accuracy for name, backend in BACKENDS.items() if not strict.against[name]} == {"strict"}
        eligible = {name for name in NOT_STRICT if not standard.against[name]}
        eligible &= {name for name in NOT_STRICT if problem.capability == (9, 0) and measured[0]}
        field = [name for name in FIELD if not standard.against[name] and BACKENDS[name].auto]
        assert standard.chosen in (eligible or field or {strict.chosen})


def test_the_classes_of_backends() -> None:
    """NVFP4, MXFP4 and bfloat16 have nothing that is not strict; weight policies are strict by their own definition."""
    assert {name for name, backend in BACKENDS.items() if backend.accuracy != "strict"} == NOT_STRICT | FIELD
    assert {name for name, backend in BACKENDS.items() if backend.of_the_field} == FIELD
    touched = {p.scheme for p in problems() if any(BACKENDS[name].fits_anywhere(p) for name in NOT_STRICT)}
    assert touched == {"fp8", "fp8_block", "int4", "mxint4"}


def test_without_results_standard_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    results(monkeypatch, [], [], capability=None, device="")
    explanation = moe.explain(FP8)
    assert explanation.chosen == "cuda_sm90"
    assert "by name only: its distance is not measured" in explanation.accuracy["triton_fp8"]


CASES = {
    "near, and never slower on this layer": (near("triton_fp8"), [TIMES], "triton_fp8", "never slower than cuda_sm90 in 2"),
    "slower at one number of tokens": (near("cuda_sm90_fp8"), [TIMES], "cuda_sm90", "slower than cuda_sm90 in 1 of 2"),
    "the least time in the mean": (
        near("triton_fp8", "cuda_sm90_fp8"),
        [TIMES | {"us": TIMES["us"] | {"cuda_sm90_fp8": {"1": 20.5, "64": 50.0}}}],  # type: ignore[operator]
        "cuda_sm90_fp8",
        "0.72 of its time in the mean",
    ),
    "as fast in the mean, and beaten by less": (
        near("triton_fp8", "cuda_sm90_fp8"),
        [TIMES | {"us": {"cuda_sm90": {"1": 20.0, "64": 100.0}, "triton_fp8": {"1": 16.0, "64": 80.0}, "cuda_sm90_fp8": {"1": 20.5, "64": 63.5}}}],
        "triton_fp8",
        "0.80 of its time in the mean",
    ),
    "as fast in the mean, and the other one beaten by more": (
        near("triton_fp8", "cuda_sm90_fp8"),
        [TIMES | {"us": {"cuda_sm90": {"1": 20.0, "8": 90.0, "64": 100.0}, "triton_fp8": {"1": 16.0, "8": 72.0, "64": 80.0}, "cuda_sm90_fp8": {"1": 19.0, "8": 85.0, "64": 58.0}}}],
        "cuda_sm90_fp8",
        "0.80 of its time in the mean",
    ),
    "slower a little, and much faster in the mean": (
        near("cuda_sm90_fp8"),
        [TIMES | {"us": TIMES["us"] | {"cuda_sm90_fp8": {"1": 23.0, "64": 50.0}}}],  # type: ignore[operator]
        "cuda_sm90_fp8",
        "up to 1.15 of cuda_sm90's time in 1 of 2 timings on this layer, 0.50 to 1.15 in all, 0.76 in the mean",
    ),
    "slower a little, where the strict one loses more than twice as much elsewhere": (
        near("cuda_sm90_fp8"),
        [TIMES | {"us": TIMES["us"] | {"cuda_sm90_fp8": {"1": 22.0, "64": 83.0}}}],  # type: ignore[operator]
        "cuda_sm90_fp8",
        "up to 1.10 of cuda_sm90's time in 1 of 2 timings on this layer, 0.83 to 1.10 in all, 0.96 in the mean",
    ),
    "slower a little, and little faster elsewhere": (
        near("cuda_sm90_fp8"),
        [TIMES | {"us": TIMES["us"] | {"cuda_sm90_fp8": {"1": 22.0, "64": 84.0}}}],  # type: ignore[operator]
        "cuda_sm90",
        "slower than cuda_sm90 in 1 of 2",
    ),
    "slower than may be, and much faster in the mean": (
        near("cuda_sm90_fp8"),
        [TIMES | {"us": TIMES["us"] | {"cuda_sm90_fp8": {"1": 23.2, "64": 10.0}}}],  # type: ignore[operator]
        "cuda_sm90",
        "slower than cuda_sm90 in 1 of 2",
    ),
    "as far as may be": (near("triton_fp8", ratio=1.1), [TIMES], "triton_fp8", "at most 1.10 times vLLM's Triton"),
    "too far": (near("triton_fp8", ratio=1.11), [TIMES], "cuda_sm90", "by name only: that is more than 1.1 times"),
    "no peer": (near("triton_fp8", ratio=None), [TIMES], "cuda_sm90", "no kernel of the field"),
    "one layer": (near("triton_fp8", layers=1), [TIMES], "cuda_sm90", "measured on too few layers (1)"),
    "other weights": (near("triton_fp8", scheme="fp8"), [TIMES], "cuda_sm90", "is not measured"),
    "not timed at all": (near("triton_fp8"), [], "cuda_sm90", "no record says that it is faster"),
    "not timed beside the strict one": (
        near("triton_fp8"),
        [TIMES | {"us": {"triton_fp8": {"1": 1.0}, "cuda_sm90": {"2": 9.0}}}],
        "cuda_sm90",
        "was not timed beside cuda_sm90",
    ),
    "one other layer": (near("triton_fp8"), [TIMES | {"num_experts": 8}], "cuda_sm90", "no record says"),
    "two other layers": (
        near("triton_fp8"),
        [TIMES | {"num_experts": 8}, TIMES | {"hidden_size": 4096}],
        "triton_fp8",
        "in 4 timings on 2 layers with such weights",
    ),
    "two other layers, one slower": (
        near("triton_fp8"),
        [TIMES | {"num_experts": 8}, TIMES | {"num_experts": 9, "us": {"cuda_sm90": {"1": 1.0}, "triton_fp8": {"1": 1.14}}}],
        "cuda_sm90",
        "slower than cuda_sm90 in 1 of 3",
    ),
    "the layer itself decides before others": (
        near("triton_fp8"),
        [TIMES, *(TIMES | {"num_experts": n, "us": {"cuda_sm90": {"1": 1.0}, "triton_fp8": {"1": 2.0}}} for n in (8, 9))],
        "triton_fp8",
        "on this layer",
    ),
}  # fmt: skip


# (experts, top_k, hidden_size, intermediate_size): Qwen3-30B, DeepSeek-V3, Mixtral, Kimi-K2, GLM-4.6, and one that no
# record has, of Moonlight's experts.
LAYERS = (
    (128, 8, 2048, 768), (256, 8, 7168, 2048), (8, 2, 4096, 14336), (384, 8, 7168, 2048), (160, 8, 5120, 1536),
    (64, 6, 2048, 1408),
)  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize(
    ("scheme", "scales"), [("fp8_block", None), ("fp8", "channel"), ("fp8", "tensor"), ("fp8", "half")], ids=str
)
def test_fp8_takes_one_backend_at_every_number_of_tokens(
    scheme: str, scales: str | None, layer: tuple[int, int, int, int]
) -> None:
    """By the library's own results: the one whose layout serves few tokens and many."""
    experts, top_k, hidden, inter = layer
    posed = dataclasses.replace(
        FP8, scheme=scheme, weight_scales=scales, top_k=top_k, num_experts=experts, num_local_experts=experts,
        hidden_size=hidden, intermediate_size=inter,
    )  # fmt: skip
    assert moe.explain(posed).chosen == "cuda_sm90_fp8"


@pytest.mark.parametrize("layer", (*LAYERS, (128, 4, 2880, 2880)), ids=str)
@pytest.mark.parametrize(
    ("scheme", "scales"), [("fp8_block", None), ("fp8", "channel"), ("fp8", "tensor"), ("fp8", "half")], ids=str
)
@pytest.mark.parametrize(
    ("act", "wanted", "chosen"),
    [("fp8", "standard", "triton_fp8"), ("fp8", "strict", "cuda_sm90"), ("none", "standard", "cuda_sm90")],
)
def test_fp8_beside_float16_takes_nothing_that_is_slower(
    act: str, wanted: str, chosen: str, scheme: str, scales: str | None, layer: tuple[int, int, int, int]
) -> None:
    """By the library's own results: 4096 tokens of the exact kernels take up to 1.6 times `triton_fp8`'s time, which is
    1.08 times theirs at most. Beside 16-bit activations, multiplied as they are, `triton` takes 1.02 to 2.0 times
    their time (benchmarks/results/h200_float16_fp8.jsonl)."""
    experts, top_k, hidden, inter = layer
    posed = dataclasses.replace(
        FP8, scheme=scheme, weight_scales=scales, top_k=top_k, num_experts=experts, num_local_experts=experts,
        hidden_size=hidden, intermediate_size=inter, act_format=act, accuracy=wanted, dtype=torch.float16,
    )  # fmt: skip
    assert moe.explain(posed).chosen == chosen


@pytest.mark.parametrize(("least", "chosen"), [(2, "triton_fp8"), (3, "cuda_sm90")])
def test_a_layer_counts_where_it_was_timed_at_several_numbers_of_tokens(
    least: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(monkeypatch, near("triton_fp8"), [TIMES])
    monkeypatch.setattr(speed, "MIN_TOKENS", least)
    assert moe.explain(FP8).chosen == chosen


@pytest.mark.parametrize("case", CASES)
def test_standard_takes_what_is_near_and_faster(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distances, times, chosen, text = CASES[case]
    results(monkeypatch, distances, times)
    explanation = moe.explain(FP8)
    assert explanation.chosen == chosen
    name = distances[0]["backend"] if chosen == "cuda_sm90" else chosen
    assert text in explanation.accuracy[name]
    assert moe.explain(dataclasses.replace(FP8, accuracy="strict")).chosen == "cuda_sm90"
    assert moe.explain(FP8, backend="cuda_sm90").chosen == "cuda_sm90", "asked for by name"


@pytest.mark.parametrize(
    "changes", [{"capability": (8, 9)}, {"capability": (10, 0)}, {"num_local_experts": 64}, {"top_k": 4}], ids=str
)
def test_results_are_for_what_was_measured(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results(monkeypatch, [], [])
    without = moe.explain(dataclasses.replace(FP8, **changes)).chosen
    results(monkeypatch, near("triton_fp8"), [TIMES])
    assert moe.explain(dataclasses.replace(FP8, **changes)).chosen == without
    assert moe.explain(FP8).chosen == "triton_fp8"


@pytest.mark.parametrize("changes", [{"activation": "gelu_tanh"}, {"constants": (1.0, 0.0, 7.0)}], ids=str)
def test_distances_count_for_the_activation_that_was_measured(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results(monkeypatch, near("triton_fp8"), [TIMES])
    explanation = moe.explain(dataclasses.replace(FP8, **changes))
    assert explanation.chosen == "cuda_sm90" and moe.explain(FP8).chosen == "triton_fp8"
    assert explanation.accuracy["triton_fp8"] == (
        "standard, 2.0e-03 to 6.0e-03 from the oracle, 9.0e-03 in the worst row with silu: at most 0.50 times vLLM's "
        "Triton kernel; by name only: its distance is measured with silu"
        + ("'s own constants alone" if "constants" in changes else " alone")
    )


@pytest.mark.parametrize(
    ("limit", "ratios", "chosen", "text"),
    [
        (10.0, (0.5, 0.8), "triton_fp8", "with silu and a limit of 1: at most 0.80 times"),  # between both
        (10.0, (0.8, 0.5), "triton_fp8", "with silu: at most 0.80 times"),
        (1.0, (0.5, 0.8), "triton_fp8", "in the worst row: at most 0.80 times"),  # what was measured
        (math.inf, (0.5, 1.2), "triton_fp8", "in the worst row: at most 0.50 times"),  # the activation's own
        (10.0, (0.5, 1.2), "cuda_sm90", "that is more than 1.1 times as far"),
        (10.0, (1.2, 0.5), "cuda_sm90", "that is more than 1.1 times as far"),
        (1.0, (1.2, 0.5), "triton_fp8", "in the worst row: at most 0.50 times"),
        (0.5, (0.5, 0.8), "cuda_sm90", "is measured with silu's own constants and limits down to 1 alone"),
        (10.0, (0.5, None), "cuda_sm90", "there is no kernel of the field to compare with"),
    ],
)
def test_a_limit_between_two_that_were_measured_is_as_far_as_the_farther(
    limit: float, ratios: tuple[float, float | None], chosen: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ratios: with silu as it is, and with a limit of 1."""
    records = near("triton_fp8", ratio=ratios[0]) + near("triton_fp8", ratio=ratios[1], limit=1.0)
    results(monkeypatch, records, [TIMES])
    explanation = moe.explain(dataclasses.replace(FP8, constants=(1.0, 0.0, limit)))
    assert explanation.chosen == chosen and text in explanation.accuracy["triton_fp8"]


def test_a_limit_counts_where_it_was_measured_on_enough_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    results(monkeypatch, near("triton_fp8") + near("triton_fp8", ratio=0.1, limit=1.0, layers=1), [TIMES])
    explanation = moe.explain(dataclasses.replace(FP8, constants=(1.0, 0.0, 10.0)))
    assert explanation.chosen == "cuda_sm90" and "too few layers (1)" in explanation.accuracy["triton_fp8"]


def test_each_activation_has_a_distance_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near with gelu_tanh, too far with situ, and without a kernel of the field beside it with silu."""
    ratios = {"silu": None, "gelu_tanh": 0.8, "situ": 1.2}
    results(
        monkeypatch, [r for a, ratio in ratios.items() for r in near("triton_fp8", activation=a, ratio=ratio)], [TIMES]
    )
    own = {a: None if a == "silu" else ACTIVATIONS[a].constants for a in (*ratios, "relu2")}  # as `prepare` poses it
    found = {a: moe.explain(dataclasses.replace(FP8, activation=a, constants=c)) for a, c in own.items()}
    chosen = {a: explanation.chosen for a, explanation in found.items()}
    assert chosen == {"silu": "cuda_sm90", "gelu_tanh": "triton_fp8", "situ": "cuda_sm90", "relu2": "cuda_sm90"}
    assert "in the worst row: at most 0.80 times" in found["gelu_tanh"].accuracy["triton_fp8"]
    assert "more than 1.1 times as far" in found["situ"].accuracy["triton_fp8"]
    assert "no kernel of the field" in found["relu2"].accuracy["triton_fp8"]
    results(monkeypatch, near("triton_fp8") + near("triton_fp8", activation="situ"), [TIMES])
    text = moe.explain(dataclasses.replace(FP8, activation="relu2")).accuracy["triton_fp8"]
    assert text.endswith("its distance is measured with silu, situ alone")
    situ = dataclasses.replace(FP8, activation="situ", constants=ACTIVATIONS["situ"].constants)
    assert moe.explain(situ).chosen == "triton_fp8"
    for constants in ((1.0, 2.0, math.inf), None):  # None: those that change nothing, which are not situ's
        callers = dataclasses.replace(situ, constants=constants)
        assert moe.explain(callers).chosen == "cuda_sm90", "constants of the caller's were not measured"


def test_a_scale_of_a_matrix_is_measured_as_that_of_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    near_fp8 = near("triton_fp8", scheme="fp8", weight_scales="half")
    results(monkeypatch, near_fp8, [TIMES | {"scheme": "fp8"}])
    chosen = {
        kind: moe.explain(dataclasses.replace(FP8, scheme="fp8", weight_scales=kind)).chosen
        for kind in ("half", "tensor", "channel", None)
    }
    assert chosen == {"half": "triton_fp8", "tensor": "triton_fp8", "channel": "cuda_sm90", None: "cuda_sm90"}
    # Where w13 is one half, a record says "tensor" itself.
    of_one_half = near("triton_fp8", scheme="fp8", weight_scales="tensor", activation="relu2_no_mul")
    results(monkeypatch, near_fp8 + of_one_half, [TIMES | {"scheme": "fp8"}])
    posed = dataclasses.replace(FP8, scheme="fp8", weight_scales="tensor", activation="relu2_no_mul")
    assert moe.explain(posed).chosen == "triton_fp8"


def test_explain_shows_class_and_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    results(monkeypatch, near("triton_fp8") + near("cuda_sm90", ratio=0.2, l2=[1e-3, 2e-3]), [TIMES])
    lines = {line.split()[1]: line.strip() for line in str(moe.explain(FP8)).splitlines()[1:]}
    assert lines["triton_fp8"].startswith("-> triton_fp8")
    assert (
        "standard, 2.0e-03 to 6.0e-03 from the oracle, 9.0e-03 in the worst row: at most 0.50 times vLLM's Triton kernel; "
        "never slower than cuda_sm90 in 2 timings on this layer, 0.85 of its time in the mean" in lines["triton_fp8"]
    )
    assert (
        lines["cuda_sm90"].startswith("ok cuda_sm90")
        and "strict, 1.0e-03 to 2.0e-03 from the oracle" in lines["cuda_sm90"]
    )
    strict = dataclasses.replace(FP8, accuracy="strict")
    lines = {line.split()[1]: line for line in str(moe.explain(strict)).splitlines()}
    assert "accuracy='strict'" in str(moe.explain(strict)).splitlines()[0]
    for name in ("triton_fp8", "cuda_sm90_fp8"):
        assert (
            'accuracy must be "standard", as results are off by more than docs/numerics.md allows, got "strict"'
            in lines[name]
        )


def test_strict_with_a_backend_by_name_that_is_not_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw(Case("fp8_block", "fp8", hidden=256, inter=256))
    for name in ("cuda_sm90_fp8", "triton_fp8"):
        kept = dataclasses.replace(BACKENDS[name], requires=())
        monkeypatch.setitem(BACKENDS, name, kept)
        assert moe.prepare(raw, backend=name).backend == name, "asked for by name"
        with pytest.raises(
            ValueError, match=rf'backend {name!r} cannot run this problem\n(?s:.)*accuracy must be "stan'
        ):
            moe.prepare(raw, backend=name, accuracy="strict")
        monkeypatch.setenv("MOEQ_BACKEND", name)
        with pytest.raises(ValueError, match='accuracy must be "standard"'):
            moe.prepare(raw, accuracy="strict")
        monkeypatch.delenv("MOEQ_BACKEND")


def test_another_word_is_refused_at_every_door() -> None:
    raw, text = make_raw(Case()), r"accuracy must be one of \['standard', 'strict'\], got 'exact'"
    doors = (
        lambda: moe.prepare(raw, accuracy="exact"),
        lambda: moe.explain(raw, accuracy="exact"),
        lambda: moe.explain(config=layer_config(), accuracy="exact"),
        lambda: moe.Problem("nvfp4", accuracy="exact"),
    )
    for door in doors:
        with pytest.raises(ValueError, match=text):
            door()


def test_plug_ins_take_the_checkpoints_fp8_activations_where_a_backend_is_near_and_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strict backends multiply fp8 codes in bfloat16, which weight-only does as well."""
    assert auto_act_format(dataclasses.replace(FP8, accuracy="strict")) == "none"
    results(monkeypatch, near("triton_fp8"), [TIMES])
    assert auto_act_format(FP8) == "fp8"
    assert auto_act_format(dataclasses.replace(FP8, accuracy="strict")) == "none"
    results(monkeypatch, near("triton_fp8", ratio=1.2), [TIMES])
    assert auto_act_format(FP8) == "none"

"""What a routing kernel is held to, whichever it is: torch on the same device, ties, NaN, infinities, any layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from routing_oracle import WITH_BIAS, WITH_FACTOR, draw, draw_bias, draw_hostile, groups_of, methods_and_groups
from torch import Tensor

from torch_moe_ops.core.routing_methods import METHODS, ROUTING_METHODS
from torch_moe_ops.routing.reference import append_shared, route_reference

methods = pytest.mark.parametrize("method", ROUTING_METHODS)
# Relative: sums in another order than torch (3.4e-7 measured with 512 experts on CUDA), and the interpreter's own exp.
WEIGHTS = 1e-6
# No sum at all, and on CUDA the kernels' exp and log1p are those of torch.
BITWISE = ("topk", "llama4", "sigmoid", "topk_sigmoid")


def top_k_of(method: str, top_k: int) -> int:
    return 1 if method == "llama4" else top_k


class RoutingCases:
    """Tests of `route(logits, bias, method, top_k, ...)`, moeq::route's arguments, on `device`."""

    route: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    device: ClassVar[str]
    rows: ClassVar[int]

    def check(self, logits: Tensor, bias: Tensor | None, method: str, *options: Any) -> None:
        """Equal ids, and weights within WEIGHTS; bit for bit where nothing is summed."""
        logits = logits.to(self.device)
        bias = None if bias is None else bias.to(self.device)
        ids, weights = self.route(logits, bias, method, *options)
        want_ids, want = route_reference(logits, bias, method, *options)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want, rtol=WEIGHTS, atol=0)
        if method in BITWISE and self.device == "cuda":
            assert torch.equal(weights, want)

    @methods
    @pytest.mark.parametrize(
        ("experts", "top_k", "groups"),
        (
            (1, 1, (0, 0)),
            (8, 2, (4, 2)),
            (60, 6, (5, 3)),
            (128, 8, (32, 5)),
            (160, 6, (8, 3)),
            (256, 8, (8, 4)),
            (512, 22, (0, 0)),
            (1000, 32, (20, 7)),
            (2048, 32, (16, 1)),
        ),
    )
    def test_agrees_with_torch(self, method: str, experts: int, top_k: int, groups: tuple[int, int]) -> None:
        bias = draw_bias(experts, seed=3) if method in WITH_BIAS else None
        factor = 2.5 if method in WITH_FACTOR else 1.0
        options = (top_k_of(method, top_k), *groups_of(method, groups), factor)
        self.check(draw(self.rows, experts, seed=experts), bias, method, *options)

    @pytest.mark.parametrize("renormalize", (True, False))
    @pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.can_choose_renormalize])
    def test_renormalize_overrides_the_method(self, method: str, renormalize: bool) -> None:
        self.check(draw(3, 60, seed=2), None, method, 6, 0, 0, 1.0, renormalize)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @pytest.mark.parametrize(
        "row",
        (
            [-1e-8, 0, 0],
            [3, -2e-8, 0, 0, -2],
            [50, 1 - 2**-24, 1, 1],
            [2, 1, 1, 1 - 2**-7, 0],
            [1, 1, 1, 1],
            [-70, 0, -70, -70.5],
        ),
        ids=str,
    )
    @methods
    def test_logits_that_are_equal_where_the_choice_ends(
        self, method: str, row: list[float], dtype: torch.dtype
    ) -> None:
        """Beside ones that are close: different logits may have the same score, by which numbers choose."""
        logits, bias = torch.tensor([row, row[::-1]]).to(dtype), None
        if method in WITH_BIAS:
            bias = torch.zeros(len(row))
        for top_k in range(1, len(row) + 1) if top_k_of(method, 2) == 2 else (1,):
            self.check(logits, bias, method, top_k)

    @methods
    def test_one_expert_in_any_strides(self, method: str) -> None:
        bias = torch.zeros(1) if method in WITH_BIAS else None
        self.check(torch.randn(1, 5, generator=torch.Generator().manual_seed(1)).t(), bias, method, 1)

    def test_a_weight_that_is_the_logit_keeps_its_sign(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = torch.tensor([[-0.0, -1.0, -2.0]]).to(dtype).to(self.device)
            assert self.route(logits, None, "topk", 1)[1].signbit().all()

    @pytest.mark.parametrize("dtype", (None, torch.float32, torch.bfloat16, torch.float16))
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k", "shared"), ((5, 12, 4, 1), (1, 256, 8, 3), (3, 2048, 30, 2))
    )
    def test_shared_experts_get_columns_behind_the_chosen_ones(
        self, tokens: int, experts: int, top_k: int, shared: int, dtype: torch.dtype | None
    ) -> None:
        logits, bias = draw(tokens, experts, seed=1).to(self.device), draw_bias(experts, seed=1).to(self.device)
        options = (logits, bias, "deepseek_v3", top_k, 2, 1, 2.5)
        weights = None
        if dtype is not None:
            weights = torch.rand(shared, tokens, device=self.device).to(dtype).T  # of any strides
        got = self.route(*options, shared=(shared, weights))
        want = append_shared(*self.route(*options), experts, shared, weights)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize("tokens", (1, 40, 700))
    @methods
    def test_a_replay_follows_the_logits(self, method: str, tokens: int) -> None:
        if self.device == "cpu":
            pytest.skip("CUDA graphs need a GPU")
        logits = draw(tokens, 64, seed=1).to(self.device)
        bias = draw_bias(64, seed=1).to(self.device) if method in WITH_BIAS else None
        options = (method, top_k_of(method, 8), *groups_of(method, (2, 1)))
        self.route(logits, bias, *options)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.route(logits, bias, *options)  # and does not wait for the device
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self.route(logits, bias, *options)
        for seed in range(2, 5):
            logits.copy_(draw(tokens, 64, seed=seed))
            graph.replay()
            eager = self.route(logits, bias, *options)
            assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    @methods
    def test_low_precision_and_strided_logits(self, method: str, dtype: torch.dtype) -> None:
        bias = draw_bias(96, seed=2) if method in WITH_BIAS else None
        logits = draw(3, 96, seed=3).to(dtype).to(self.device)
        wide = torch.zeros(3, 192, dtype=dtype, device=self.device)
        wide[:, ::2] = logits
        twice = torch.cat((logits, logits), dim=1)
        # Values that repeat in these dtypes make ties, which rounding must not break.
        for same in (logits, wide[:, ::2], twice[:, 96:], logits.t().contiguous().t()):
            self.check(same, bias, method, top_k_of(method, 6))

    @methods
    def test_ties_go_to_the_lowest_index(self, method: str) -> None:
        for experts in (8, 60, 2048):
            k = top_k_of(method, min(32, experts))
            ids, _ = self.route(torch.zeros(2, experts, device=self.device), None, method, k)
            assert ids.tolist() == [list(range(k))] * 2
        logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 1.0, -0.0, -2.0]], device=self.device)
        k = top_k_of(method, 8)
        assert self.route(logits, None, method, k)[0].tolist() == [[1, 3, 0, 5, 2, 4, 6, 7][:k]]

    def test_ties_between_groups_go_to_the_lowest_group(self) -> None:
        logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]], device=self.device)
        ids, _ = self.route(logits, torch.zeros(6, device=self.device), "deepseek_v3", 4, 3, 2)
        assert ids.tolist() == [[1, 2, 0, 3]]

    @methods
    def test_rows_of_nan(self, method: str) -> None:
        k = top_k_of(method, 10)
        for bias in (None, draw_bias(60, seed=1).to(self.device)) if method in WITH_BIAS else (None,):
            for groups in {(0, 0), groups_of(method, (4, 3))}:
                rows = torch.full((2, 60), math.nan, device=self.device)
                ids, weights = self.route(rows, bias, method, k, *groups)
                assert ids.tolist() == [list(range(k))] * 2
                assert not weights.any()

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which Triton's interpreter computes
    @pytest.mark.parametrize(("method", "groups"), methods_and_groups((6, 3)))
    def test_hostile_logits(self, method: str, groups: tuple[int, int]) -> None:
        g = torch.Generator().manual_seed(0)
        bias = draw_bias(60, seed=1) if method in WITH_BIAS else None
        for fewer in range(4):
            self.check(draw_hostile(self.rows, 60, g, fewer), bias, method, top_k_of(method, 10), *groups)

    def test_subnormal_probabilities_keep_their_order(self) -> None:
        """DeepSeek-V2's router after one dominant logit."""
        logits = torch.tensor([[-95.0, 0.0, -90.0, -92.0, -100.0]], device=self.device)
        assert self.route(logits, None, "default", 5)[0].tolist() == [[1, 2, 3, 0, 4]]

    def test_groups_are_chosen_by_two_best_with_a_bias_and_by_the_best_without(self) -> None:
        logits = torch.tensor([[2.0, 2.0, 3.0, -9.0]], device=self.device)
        assert self.route(logits, None, "renormalize", 2, 2, 1)[0].tolist() == [[2, 3]]
        zero = torch.zeros(4, device=self.device)
        assert self.route(logits, zero, "deepseek_v3", 2, 2, 1)[0].tolist() == [[0, 1]]

    def test_no_tokens(self) -> None:
        ids, weights = self.route(torch.zeros(0, 8, device=self.device), None, "renormalize", 2)
        assert ids.shape == weights.shape == (0, 2)

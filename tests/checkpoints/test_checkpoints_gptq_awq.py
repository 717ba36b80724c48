"""GPTQ and AWQ: no tool's file is at hand, so files are encoded here, in numpy, from the formats' definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints_support import decode, write
from torch import Tensor

from torch_moe_ops.checkpoints import CheckpointError, load_experts

ROOT = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu"}


class TestGptqAwq:
    """numpy encoders of the two formats; the truth is the codes, zeros and scales they start from."""

    HIDDEN, INTER, EXPERTS, GROUP = 64, 96, 3, 32

    def problem(self, symmetric: bool) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(11)
        made = {}
        for e in range(self.EXPERTS):
            for p in PROJECTIONS:
                n, k = (self.HIDDEN, self.INTER) if p == "down_proj" else (self.INTER, self.HIDDEN)
                codes = rng.integers(0, 16, (n, k))
                zeros = np.full((n, k // self.GROUP), 8) if symmetric else rng.integers(0, 16, (n, k // self.GROUP))
                scales = (rng.random((n, k // self.GROUP)) + 0.5).astype(np.float16)
                made[f"{ROOT}.{e}.{p}"] = codes, zeros, scales
        return made

    @staticmethod
    def words(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
        """[n, 8m] -> int32 [n, m]; nibble i of a word is column order[i] of its eight."""
        out = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
        for nibble, column in enumerate(order):
            out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return out.view(np.int32)

    def gptq(self, problem, *, version: int, g_idx: bool) -> dict[str, Tensor]:
        tensors = {}
        straight = tuple(range(8))
        for root, (codes, zeros, scales) in problem.items():
            stored_zeros = zeros.T if version == 2 else (zeros.T - 1) % 16
            tensors[f"{root}.qweight"] = torch.from_numpy(self.words(codes, straight).T.copy())
            tensors[f"{root}.qzeros"] = torch.from_numpy(self.words(stored_zeros, straight))
            tensors[f"{root}.scales"] = torch.from_numpy(scales.T.copy())
            if g_idx:
                tensors[f"{root}.g_idx"] = torch.arange(codes.shape[1], dtype=torch.int32) // self.GROUP
        return tensors

    def awq(self, problem) -> dict[str, Tensor]:
        tensors = {}
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        for root, (codes, zeros, scales) in problem.items():
            tensors[f"{root}.qweight"] = torch.from_numpy(self.words(codes.T, order))
            tensors[f"{root}.qzeros"] = torch.from_numpy(self.words(zeros.T, order))
            tensors[f"{root}.scales"] = torch.from_numpy(scales.T.copy())
        return tensors

    def check(self, raw, problem):
        assert raw.scheme == "int4" and raw.w13_scale.dtype == torch.float16
        for e in range(self.EXPERTS):
            values = {}
            for p in PROJECTIONS:
                codes, zeros, scales = problem[f"{ROOT}.{e}.{p}"]
                spread = [np.repeat(x, self.GROUP, axis=1).astype(np.float32) for x in (zeros, scales)]
                values[p] = (codes - spread[0]) * spread[1]
            want = np.concatenate([values["gate_proj"], values["up_proj"]])
            np.testing.assert_array_equal(decode(raw, "w13", e), want)
            np.testing.assert_array_equal(decode(raw, "w2", e), values["down_proj"])

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("version", [1, 2])
    def test_gptq(self, tmp_path, symmetric, version):
        problem = self.problem(symmetric)
        quantization = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
        folder = write(
            tmp_path,
            self.gptq(problem, version=version, g_idx=version == 1),
            {**CONFIG, "quantization_config": quantization},
        )
        raw = load_experts(folder, 0)
        assert (raw.w13_zero_point is None) == symmetric
        self.check(raw, problem)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_awq(self, tmp_path, symmetric):
        problem = self.problem(symmetric)
        quantization = {"quant_method": "awq", "bits": 4, "version": "gemm"}
        folder = write(tmp_path, self.awq(problem), {**CONFIG, "quantization_config": quantization})
        self.check(load_experts(folder, 0), problem)

    def test_activation_order_is_refused(self, tmp_path):
        tensors = self.gptq(self.problem(True), version=1, g_idx=True)
        key = f"{ROOT}.1.down_proj.g_idx"
        tensors[key] = tensors[key].flip(0)
        with pytest.raises(CheckpointError, match=rf"{key} \(expert 1, down\) must be in order: .*desc_act"):
            load_experts(write(tmp_path, tensors, CONFIG), 0)

    def test_eight_bits_are_refused(self, tmp_path):
        tensors = self.gptq(self.problem(True), version=1, g_idx=False)
        key = f"{ROOT}.0.gate_proj.qzeros"
        tensors[key] = tensors[key].repeat(1, 2)
        with pytest.raises(
            CheckpointError, match=rf"{key} \(expert 0, gate\) must have shape \(2, 12\), got \(2, 24\)"
        ):
            load_experts(write(tmp_path, tensors, CONFIG), 0)

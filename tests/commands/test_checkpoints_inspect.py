"""`python -m torch_moe_ops inspect`: its text on the fixtures, and how it reports damage."""

from __future__ import annotations

import subprocess
import sys

import expecttest
import pytest
import torch
from checkpoints_support import FIXTURES, changed, write

from torch_moe_ops import explain
from torch_moe_ops.__main__ import main
from torch_moe_ops.checkpoints import load_experts
from torch_moe_ops.commands.inspect import Inspection

NAME = "qwen3_moe_modelopt_nvfp4"


class TestText(expecttest.TestCase):
    def test_fixtures(self):
        report = []
        for folder in sorted(FIXTURES.iterdir()):
            lines = list(Inspection(folder, backends=False).lines())
            report += [lines[0].replace(f"{FIXTURES}/", ""), *lines[1:]]
        self.assertExpectedInline(
            "\n".join(report),
            """\
deepseek_v3_modelopt_nvfp4: 143 tensors in 3 files
layer 1: ModelOpt NVFP4 -> scheme nvfp4
  8 experts, hidden_size 128, intermediate_size 64, gated, activation silu
  w13             uint8          (8, 128, 64)
  w2              uint8          (8, 128, 32)
  w13_scale       float8_e4m3fn  (8, 128, 8)
  w2_scale        float8_e4m3fn  (8, 128, 4)
  w13_scale_2     float32        (8, 2)
  w2_scale_2      float32        (8,)
  a13_input_scale float32        (8,)
  a2_input_scale  float32        (8,)
gpt_oss_modelopt_nvfp4: 26 tensors in 1 file
layer 0: ModelOpt NVFP4 -> scheme nvfp4
  4 experts, hidden_size 64, intermediate_size 80, gated, activation swigluoai (alpha 1.702, beta 1, limit 7)
  w13             uint8          (4, 160, 32)
  w2              uint8          (4, 64, 40)
  w13_scale       float8_e4m3fn  (4, 160, 4)
  w2_scale        float8_e4m3fn  (4, 64, 5)
  w13_scale_2     float32        (4, 2)
  w2_scale_2      float32        (4,)
  a13_input_scale float32        ()
  a2_input_scale  float32        ()
  w13_bias        bfloat16       (4, 160)
  w2_bias         bfloat16       (4, 64)
gpt_oss_mxfp4: 22 tensors in 1 file
layer 0: gpt-oss MXFP4 -> scheme mxfp4
  6 experts, hidden_size 64, intermediate_size 160, gated, activation swigluoai (alpha 1.702, beta 1, limit 7)
  w13             uint8          (6, 320, 32)
  w2              uint8          (6, 64, 80)
  w13_scale       uint8          (6, 320, 2)
  w2_scale        uint8          (6, 64, 5)
  w13_bias        bfloat16       (6, 320)
  w2_bias         bfloat16       (6, 64)
mixtral_modelopt_nvfp4: 58 tensors in 1 file
layer 0: ModelOpt NVFP4 -> scheme nvfp4
  4 experts, hidden_size 64, intermediate_size 112, gated, activation silu
  w13             uint8          (4, 224, 32)
  w2              uint8          (4, 64, 56)
  w13_scale       float8_e4m3fn  (4, 224, 4)
  w2_scale        float8_e4m3fn  (4, 64, 7)
  w13_scale_2     float32        (4, 2)
  w2_scale_2      float32        (4,)
  a13_input_scale float32        (4,)
  a2_input_scale  float32        (4,)
nemotron_h_modelopt_nvfp4: 77 tensors in 1 file
layer 1: ModelOpt NVFP4 -> scheme nvfp4
  8 experts, hidden_size 64, intermediate_size 48, not gated, activation relu2_no_mul
  w13             uint8          (8, 48, 32)
  w2              uint8          (8, 64, 24)
  w13_scale       float8_e4m3fn  (8, 48, 4)
  w2_scale        float8_e4m3fn  (8, 64, 3)
  w13_scale_2     float32        (8, 1)
  w2_scale_2      float32        (8,)
  a13_input_scale float32        (8,)
  a2_input_scale  float32        (8,)
qwen3_moe_ct_fp8_channel: 60 tensors in 1 file
layer 0: FP8 per tensor or channel (ModelOpt, compressed-tensors) -> scheme fp8
  8 experts, hidden_size 80, intermediate_size 48, gated, activation silu
  w13             float8_e4m3fn  (8, 96, 80)
  w2              float8_e4m3fn  (8, 80, 48)
  w13_scale       float32        (8, 96, 1)
  w2_scale        float32        (8, 80, 1)
qwen3_moe_ct_int4_g32: 66 tensors in 1 file
layer 0: compressed-tensors pack-quantized int4 -> scheme mxint4
  6 experts, hidden_size 64, intermediate_size 160, gated, activation silu
  w13             int32          (6, 320, 8)
  w2              int32          (6, 64, 20)
  w13_scale       bfloat16       (6, 320, 2)
  w2_scale        bfloat16       (6, 64, 5)
qwen3_moe_ct_int8: 60 tensors in 1 file
layer 0: int8 (compressed-tensors int-quantized) -> scheme int8
  8 experts, hidden_size 64, intermediate_size 56, gated, activation silu
  w13             int8           (8, 112, 64)
  w2              int8           (8, 64, 56)
  w13_scale       bfloat16       (8, 112, 1)
  w2_scale        bfloat16       (8, 64, 1)
qwen3_moe_ct_mxfp4: 36 tensors in 1 file
layer 0: compressed-tensors mxfp4-pack-quantized -> scheme mxfp4
  4 experts, hidden_size 128, intermediate_size 96, gated, activation silu
  w13             uint8          (4, 192, 64)
  w2              uint8          (4, 128, 48)
  w13_scale       uint8          (4, 192, 4)
  w2_scale        uint8          (4, 128, 3)
qwen3_moe_ct_nvfp4: 108 tensors in 1 file
layer 0: compressed-tensors nvfp4-pack-quantized -> scheme nvfp4
  8 experts, hidden_size 80, intermediate_size 176, gated, activation silu
  w13             uint8          (8, 352, 40)
  w2              uint8          (8, 80, 88)
  w13_scale       float8_e4m3fn  (8, 352, 5)
  w2_scale        float8_e4m3fn  (8, 80, 11)
  w13_scale_2     float32        (8, 2)
  w2_scale_2      float32        (8,)
  a13_input_scale float32        (8,)
  a2_input_scale  float32        (8,)
qwen3_moe_fp8_block: 40 tensors in 1 file
layer 0: FP8 128x128 (DeepSeek) -> scheme fp8_block
  4 experts, hidden_size 160, intermediate_size 144, gated, activation silu
  w13             float8_e4m3fn  (4, 288, 160)
  w2              float8_e4m3fn  (4, 160, 144)
  w13_scale       float32        (4, 4, 2)
  w2_scale        float32        (4, 2, 2)
qwen3_moe_modelopt_fp8: 74 tensors in 1 file
layer 0: FP8 per tensor or channel (ModelOpt, compressed-tensors) -> scheme fp8
  6 experts, hidden_size 64, intermediate_size 48, gated, activation silu
  w13             float8_e4m3fn  (6, 96, 64)
  w2              float8_e4m3fn  (6, 64, 48)
  w13_scale       float32        (6, 2)
  w2_scale        float32        (6, 1)
  a13_input_scale float32        (6,)
  a2_input_scale  float32        (6,)
qwen3_moe_modelopt_nvfp4: 237 tensors in 1 file
layer 0: ModelOpt NVFP4 -> scheme nvfp4
  8 experts, hidden_size 64, intermediate_size 48, gated, activation silu
  w13             uint8          (8, 96, 32)
  w2              uint8          (8, 64, 24)
  w13_scale       float8_e4m3fn  (8, 96, 4)
  w2_scale        float8_e4m3fn  (8, 64, 3)
  w13_scale_2     float32        (8, 2)
  w2_scale_2      float32        (8,)
  a13_input_scale float32        (8,)
  a2_input_scale  float32        (8,)
layer 1: ModelOpt NVFP4 -> scheme nvfp4
  8 experts, hidden_size 64, intermediate_size 48, gated, activation silu
  w13             uint8          (8, 96, 32)
  w2              uint8          (8, 64, 24)
  w13_scale       float8_e4m3fn  (8, 96, 4)
  w2_scale        float8_e4m3fn  (8, 64, 3)
  w13_scale_2     float32        (8, 2)
  w2_scale_2      float32        (8,)
  a13_input_scale float32        (8,)
  a2_input_scale  float32        (8,)
qwen3_moe_modelopt_nvfp4_w4a16: 74 tensors in 1 file
layer 0: ModelOpt NVFP4 -> scheme nvfp4
  6 experts, hidden_size 96, intermediate_size 80, gated, activation silu
  w13             uint8          (6, 160, 48)
  w2              uint8          (6, 96, 40)
  w13_scale       float8_e4m3fn  (6, 160, 6)
  w2_scale        float8_e4m3fn  (6, 96, 5)
  w13_scale_2     float32        (6, 2)
  w2_scale_2      float32        (6,)""",
        )


def test_backends_are_explained_once_per_kind(capsys):
    assert main(["inspect", str(FIXTURES / NAME)]) == 0
    out = capsys.readouterr().out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for line in str(explain(load_experts(FIXTURES / NAME, 0), device=device)).splitlines():
        assert out.count(f"  {line}\n") == 1
    assert out.count("backends: as layer 0") == 1


def test_one_layer(capsys):
    assert main(["inspect", str(FIXTURES / NAME), "--layer", "1", "--no-backends"]) == 0
    out = capsys.readouterr().out
    assert "layer 1: ModelOpt NVFP4" in out and "layer 0" not in out
    assert main(["inspect", str(FIXTURES / NAME), "--layer", "5"]) == 2
    assert "layers with experts: [0, 1]" in capsys.readouterr().err


def test_problems_do_not_hide_other_layers(tmp_path, capsys):
    bad = "model.layers.0.mlp.experts.5.up_proj.weight_scale_2"
    folder = changed(tmp_path, NAME, lambda tensors: tensors.update({bad: torch.tensor(0.0)}))
    assert main(["inspect", str(folder), "--no-backends"]) == 1
    out = capsys.readouterr().out
    assert f"tensor {bad} (expert 5, up) must be finite and positive, got 0.0" in out
    assert "layer 1: ModelOpt NVFP4" in out
    assert main(["inspect", str(folder), "--no-backends", "--quick"]) == 0


def test_nothing_to_inspect(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "problem: " in capsys.readouterr().err
    write(tmp_path, {"lm_head.weight": torch.zeros(2, 2)})
    assert main(["inspect", str(tmp_path)]) == 1
    assert "no layer has experts" in capsys.readouterr().out


def test_without_a_config(tmp_path, capsys):
    shapes = {"gate": (16, 32), "up": (16, 32), "down": (32, 16)}
    experts = {f"layers.0.mlp.experts.{e}.{p}_proj.weight": torch.ones(s) for e in (0, 1) for p, s in shapes.items()}
    assert main(["inspect", str(write(tmp_path, experts))]) == 0
    assert "activation not known" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["inspect", "x", "--layer", "one"]])
def test_usage(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_as_a_command():
    command = [sys.executable, "-m", "torch_moe_ops", "inspect", str(FIXTURES / NAME), "--quick", "--no-backends"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "layer 0: ModelOpt NVFP4 -> scheme nvfp4" in done.stdout and done.stderr == ""

"""Names, layers, prediction layers, configs; and that loading reads once, in little memory."""

from __future__ import annotations

import builtins
import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from checkpoints_support import FIXTURES, NVFP4_FIXTURES, config_of, copied, stored, write

from torch_moe_ops.checkpoints import CheckpointError, index, load_experts, progress
from torch_moe_ops.checkpoints.model_config import activation_fields, parse_config
from torch_moe_ops.checkpoints.naming import find_layers
from torch_moe_ops.core.mapped_memory import mapped_empty
from torch_moe_ops.core.same_bits import same_bits
from torch_moe_ops.files.tensor_reader import TensorReader

NAME = "qwen3_moe_modelopt_nvfp4"


def experts(root: str, value: float = 1.0, count: int = 2) -> dict[str, torch.Tensor]:
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    return {
        f"{root}.experts.{e}.{p}.weight": torch.full(shape, float(value + e))
        for e in range(count)
        for p, shape in shapes.items()
    }


@pytest.mark.parametrize(
    "root",
    [
        "layers.3.ffn",
        "model.layers.3.mlp",
        "model.language_model.layers.3.mlp",
        "language_model.model.layers.3.feed_forward",
        "backbone.layers.3.mixer",
        "model.layers.3.block_sparse_moe",
        "model.layers.3",
    ],
)
def test_any_prefix_and_module(tmp_path, root):
    raw = load_experts(write(tmp_path, experts(root)), 3)
    assert raw.num_experts == 2 and raw.w13[1, 0, 0] == 2


def test_shared_experts_and_dense_layers_are_no_experts(tmp_path):
    tensors = experts("model.layers.1.mlp")
    tensors["model.layers.1.mlp.shared_experts.gate_proj.weight"] = torch.zeros(4, 6)
    tensors["model.layers.1.mlp.shared_expert.up_proj.weight"] = torch.zeros(4, 6)
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(2, 6)
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(4, 6)
    tensors["vision.blocks.0.experts.0.thing"] = torch.zeros(4, 6)
    folder = write(tmp_path, tensors)
    assert [raw.source.rsplit(" ", 1)[1] for raw in load_experts(folder, None)] == ["1"]


def test_all_layers_in_ascending_order(tmp_path):
    tensors = {}
    for n in (10, 2, 1):
        tensors.update(experts(f"model.layers.{n}.mlp", value=n))
    found = list(load_experts(write(tmp_path, tensors), None))
    assert [raw.source for raw in found] == [f"{tmp_path} layer {n}" for n in (1, 2, 10)]
    assert [raw.w13[0, 0, 0].item() for raw in found] == [1, 2, 10]


@pytest.mark.parametrize("how", ["config", "nested config", "eh_proj", "mtp.layers", "mtp"])
def test_prediction_layers_only_with_mtp(tmp_path, how):
    number, root = 2, "model.layers.2.mlp"
    config: dict = {}
    tensors = experts("model.layers.1.mlp", value=1)
    if how == "config":
        config = {"num_hidden_layers": 2}
    elif how == "nested config":
        config = {"num_hidden_layers": 99, "text_config": {"num_hidden_layers": 2}}
    elif how == "eh_proj":
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(2, 2)
    else:
        number, root = 1, f"{how}.1.mlp"
    tensors.update(experts(root, value=50))
    folder = write(tmp_path, tensors, config)
    assert load_experts(folder, number, mtp=True).w13[0, 0, 0] == 50
    assert load_experts(folder, 1, mtp=how not in ("mtp", "mtp.layers")).w13[0, 0, 0] == 1
    assert [raw.w13[0, 0, 0].item() for raw in load_experts(folder, None)] == [1]
    assert [raw.w13[0, 0, 0].item() for raw in load_experts(folder, None, mtp=True)] == [1, 50]
    if number == 2:
        with pytest.raises(CheckpointError, match=r"experts: \[1\], multi-token-prediction layers \(mtp=True\): \[2\]"):
            load_experts(folder, 2)


def test_quantized_layers_beside_unquantized_ones(tmp_path):
    """As in published files: prediction layers stay in bf16. The tensors decide, layer by layer."""
    tensors = stored(NAME)
    tensors.update(experts("model.layers.2.mlp", count=8))
    folder = write(tmp_path, tensors, config_of(NAME))
    assert [raw.scheme for raw in load_experts(folder, None, mtp=True)] == ["nvfp4", "nvfp4", "none"]


def test_non_gated_experts_in_floats(tmp_path):
    tensors = {k: t for k, t in experts("model.layers.0.mlp").items() if "gate_proj" not in k}
    raw = load_experts(write(tmp_path, tensors, {"hidden_act": "silu"}), 0)
    assert not raw.is_gated and raw.activation == "silu_no_mul"


def test_biases_per_expert(tmp_path):
    tensors = experts("model.layers.0.mlp")
    for name in list(tensors):
        tensors[name.replace("weight", "bias")] = tensors[name].new_tensor(range(tensors[name].shape[0]))
    raw = load_experts(write(tmp_path, tensors), 0)
    assert raw.w13_bias.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2 and raw.w2_bias.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_single_file_path_and_odd_file_name(tmp_path):
    folder = copied(tmp_path, NAME)
    by_folder = load_experts(folder, 1)
    by_file = load_experts(folder / "model.safetensors", 1)
    assert by_file.activation == "silu" and torch.equal(by_folder.w13, by_file.w13)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(load_experts(folder, 1).w13, by_folder.w13)
    (folder / "more.safetensors").write_bytes((folder / "weights.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"must hold model.safetensors or .*index.json"):
        load_experts(folder, 1)


@pytest.mark.parametrize("name", NVFP4_FIXTURES)
def test_config_is_optional(tmp_path, name):
    """Scheme and values come from the tensors; only the activation needs the config, gpt-oss not even for that."""
    folder = copied(tmp_path, name)
    with_config = next(load_experts(folder, None))
    (folder / "config.json").unlink()
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    without = next(load_experts(folder, None))
    assert without.activation == ("swigluoai" if name.startswith("gpt_oss") else None)
    assert without.tensors().keys() == with_config.tensors().keys()
    for key, tensor in without.tensors().items():
        assert same_bits(tensor, with_config.tensors()[key]), key


def test_index_is_built_once_and_again_after_a_change(tmp_path, monkeypatch):
    folder = copied(tmp_path, NAME)
    headers = []
    read_header = index.read_header
    monkeypatch.setattr(index, "read_header", lambda file: headers.append(file) or read_header(file))
    load_experts(folder, 0)
    load_experts(folder, 1)
    assert len(headers) == 1
    write(folder, experts("model.layers.0.mlp", count=8))
    assert load_experts(folder, 0).scheme == "none"
    assert len(headers) == 2
    config = config_of(NAME) | {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_experts(folder, 0).activation == "gelu"


def test_every_byte_is_read_once(tmp_path, monkeypatch):
    reads = []
    read = TensorReader.read

    def counted(self, name, row=None):
        value = read(self, name, row)
        reads.append((name, value.nbytes))
        return value

    monkeypatch.setattr(TensorReader, "read", counted)
    for name in (NAME, "gpt_oss_modelopt_nvfp4", "qwen3_moe_ct_nvfp4"):
        reads.clear()
        load_experts(FIXTURES / name, 0)
        layer = {k: t for k, t in stored(name).items() if ".layers.0." in k and ".experts." in k}
        assert {name for name, _ in reads} == layer.keys()
        # A scalar that all experts share is read for each of them.
        sizes = [size for name, size in reads if layer[name].ndim]
        assert sum(sizes) == sum(t.nbytes for t in layer.values() if t.ndim)


def test_peak_memory_is_the_result_and_one_projection(tmp_path):
    count, rows, columns = 24, 128, 256
    tensors = {}
    for e in range(count):
        for p, shape in (("gate_proj", (rows, columns)), ("up_proj", (rows, columns)), ("down_proj", (columns, rows))):
            tensors[f"model.layers.0.mlp.experts.{e}.{p}.weight"] = torch.zeros(shape)
    folder = write(tmp_path, tensors)
    load_experts(folder, 0)
    matrix = rows * columns * 4
    tracemalloc.start()
    try:
        raw = load_experts(folder, 0)
        # Tensors lie outside of Python's allocator, what is read from files lies inside.
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert raw.w13.nbytes == 2 * count * matrix
    assert matrix <= peak < 3 * matrix + 300_000


def test_device(tmp_path):
    raw = load_experts(FIXTURES / NAME, 0, device=torch.device("cpu"))
    assert raw.device.type == "cpu"
    assert load_experts(write(tmp_path, experts("layers.0.mlp")), 0, device="meta").device.type == "meta"


def test_progress_bar_only_where_it_takes_long(monkeypatch, capsys):
    load_experts(FIXTURES / NAME, 0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    load_experts(FIXTURES / NAME, 0)
    captured = capsys.readouterr()
    assert f"{NAME} layer 0" in captured.err and captured.out == ""


def test_progress_bar_is_optional(monkeypatch):
    real_import = builtins.__import__

    def no_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tqdm)
    assert load_experts(FIXTURES / NAME, 0).num_experts == 8


def test_a_hundred_thousand_names():
    names = [
        f"model.layers.{n}.mlp.experts.{e}.{p}.{part}"
        for n in range(40)
        for e in range(256)
        for p in ("gate_proj", "up_proj", "down_proj")
        for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")
    ]
    layers = find_layers(names, 39)
    assert len(names) == 122_880 and len(layers) == 40
    assert all(len(layer.experts) == 256 and layer.experts[255]["up"].keys() >= {"weight"} for layer in layers)
    assert [layer.number for layer in layers if layer.mtp] == [39]


@pytest.mark.parametrize(
    ("config", "is_gated", "wanted"),
    [
        ({"hidden_act": "silu"}, True, {"activation": "silu"}),
        ({"hidden_act": "silu"}, False, {"activation": "silu_no_mul"}),
        ({"hidden_act": "gelu_pytorch_tanh"}, True, {"activation": "gelu_tanh"}),
        ({"hidden_act": "relu2"}, True, {"activation": "relu2"}),
        ({"mlp_hidden_act": "relu2"}, False, {"activation": "relu2_no_mul"}),
        ({"text_config": {"hidden_activation": "gelu"}, "hidden_act": "x"}, True, {"activation": "gelu"}),
        ({"hidden_act": "silu", "swiglu_limit": 10}, True, {"activation": "silu", "swiglu_limit": 10.0}),
        ({"hidden_act": "silu", "swiglu_limit": None}, True, {"activation": "silu"}),
        ({"hidden_act": "silu", "swiglu_limit": 0}, True, {"activation": "silu"}),
        (
            {"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 6},
            True,
            {"activation": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 6.0},
        ),
        ({}, True, {}),
    ],
)
def test_activation_of_a_config(config, is_gated, wanted):
    assert activation_fields(parse_config(config, {}), is_gated=is_gated, is_gpt_oss=False) == wanted


def test_gpt_oss_constants_come_from_the_config():
    config = parse_config({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 5.5}, {})
    assert activation_fields(config, is_gated=True, is_gpt_oss=config.is_gpt_oss) == {
        "activation": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
        "swiglu_limit": 5.5,
    }


def test_unknown_activation_warns(tmp_path):
    folder = write(tmp_path, experts("layers.0.mlp"), {"hidden_act": "quick_gelu"})
    with pytest.warns(UserWarning, match="hidden_act 'quick_gelu' of a gated expert is unknown"):
        raw = load_experts(folder, 0)
    assert raw.activation is None


def test_memory_of_a_layer_goes_back_to_the_system() -> None:
    """malloc would keep blocks of this size, and split them for smaller ones."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs Linux: /proc/self/status has the memory")

    def anonymous() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon:"))

    before = anonymous()
    for round_ in range(8):
        kept = torch.zeros(1 << 16)  # what is allocated afterwards lies beyond it
        buffer = mapped_empty((4, 1 << 20), torch.float32, torch.device("cpu")).zero_()
        assert anonymous() - before > 15 * 1024
        kept[round_] = buffer[0, 0]
        del buffer
        assert anonymous() - before < 8 * 1024

"""FusedMoEConfig: defaults, checks, pass-through, quant configs against its sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from config_samples import CALLS, EXPERTS, HIDDEN, INTER, blocks, build, layer_config, per_expert

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    get_routing_method_type,
)
from torch_moe_ops.config.formats import FORMATS
from torch_moe_ops.config.moe import MOE_BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES


def test_fields_and_their_order_are_those_of_the_field() -> None:
    names = " ".join(f.name for f in dataclasses.fields(FusedMoEConfig))
    assert names == (
        "num_experts experts_per_token hidden_dim intermediate_size_per_partition num_local_experts "
        "num_logical_experts activation device routing_method moe_parallel_config in_dtype router_logits_dtype "
        "hidden_dim_unpadded intermediate_size_per_partition_unpadded moe_backend max_num_tokens has_bias "
        "is_act_and_mul is_lora_enabled disable_inplace"
    )


def test_defaults() -> None:
    made = layer_config()
    assert made.router_logits_dtype == torch.bfloat16 and made.max_num_tokens == 256
    assert (made.hidden_dim_unpadded, made.intermediate_size_per_partition_unpadded) == (HIDDEN, INTER)
    assert made.device == torch.device("cpu") and made.moe_backend == "auto"
    assert made.is_act_and_mul is True and made.disable_inplace and not made.has_bias
    assert dataclasses.replace(made, max_num_tokens=8) == layer_config(max_num_tokens=8)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gating_follows_from_the_activation(name: str) -> None:
    gated = not name.endswith("_no_mul")
    made = layer_config(activation=name)
    assert made.is_act_and_mul is gated and made.is_gated is gated
    assert layer_config(activation=name, is_act_and_mul=gated) == made
    with pytest.raises(ValueError, match=rf"is_act_and_mul must be {gated} \(or None\) for activation '{name}'"):
        layer_config(activation=name, is_act_and_mul=not gated)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_experts": 0}, ValueError, "num_experts must lie in [1, 2048], got 0"),
        ({"num_experts": 2049}, ValueError, "num_experts must lie in [1, 2048], got 2049"),
        ({"experts_per_token": 4}, ValueError, "experts_per_token must lie in [1, 3], got 4"),
        ({"experts_per_token": 3, "num_logical_experts": 2}, ValueError, "experts_per_token must lie in [1, 2], got 3"),
        ({"num_logical_experts": 4}, ValueError, "num_logical_experts must lie in [1, 3], got 4"),
        ({"num_local_experts": 2}, ValueError, "num_local_experts must be 3: the share of ep_rank 0 of 1 in 3 experts"),
        ({"hidden_dim": 0}, ValueError, "hidden_dim must be at least 1, got 0"),
        ({"hidden_dim": 64.0}, TypeError, "hidden_dim must be an int, got float"),
        ({"hidden_dim_unpadded": 65}, ValueError, "hidden_dim_unpadded must lie in [1, 64], got 65"),
        ({"intermediate_size_per_partition": -1}, ValueError, "intermediate_size_per_partition must be at least 1"),
        ({"max_num_tokens": 0}, ValueError, "max_num_tokens must be at least 1, got 0"),
        ({"activation": "swish"}, ValueError, "activation must be one of silu, swigluoai"),
        ({"activation": None}, ValueError, "activation must be one of silu, swigluoai"),
        ({"device": "gpu"}, ValueError, "device must be a device that torch knows, got 'gpu'"),
        ({"device": 0}, TypeError, "device must be a device, got int"),
        ({"routing_method": "renormalize"}, TypeError, "routing_method must be a RoutingMethodType, got str"),
        (
            {"moe_parallel_config": None},
            TypeError,
            "moe_parallel_config must be a FusedMoEParallelConfig, got NoneType",
        ),
        ({"in_dtype": torch.int8}, ValueError, "in_dtype must be one of torch.float32, torch.bfloat16, torch.float16"),
        ({"router_logits_dtype": "float32"}, TypeError, "router_logits_dtype must be a torch.dtype, got str"),
        ({"has_bias": 1}, TypeError, "has_bias must be a bool, got int"),
        ({"is_lora_enabled": True}, ValueError, "is_lora_enabled must be False: no backend applies LoRA adapters"),
        ({"moe_backend": "marlin"}, ValueError, "moe_backend must be one of auto, flashinfer_trtllm"),
    ],
)
def test_rejects(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        layer_config(**changes)
    message = str(caught.value)
    assert message.startswith("FusedMoEConfig: ") and text in message


def test_limits_are_accepted() -> None:
    sizes = {name: 2048 for name in ("num_experts", "num_local_experts", "num_logical_experts")}
    assert layer_config(**sizes, experts_per_token=32).experts_per_token == 32
    with pytest.raises(ValueError, match=r"experts_per_token must lie in \[1, 32\], got 33"):
        layer_config(**sizes, experts_per_token=33)


def test_local_experts_come_from_the_parallel_config() -> None:
    shares = []
    for rank in range(4):
        parallel = FusedMoEParallelConfig.make(4, 1, 1, 1, enable_expert_parallel=True, tp_rank=rank)
        count = 3 if rank < 2 else 2
        sizes = {"num_experts": 10, "num_logical_experts": 10, "num_local_experts": count}
        made = layer_config(moe_parallel_config=parallel, **sizes)
        shares.append((made.local_expert_offset, made.num_local_experts))
        with pytest.raises(ValueError, match=f"num_local_experts must be {count}: the share of ep_rank {rank} of 4"):
            layer_config(moe_parallel_config=parallel, **{**sizes, "num_local_experts": 5 - count})
    assert shares == [(0, 3), (3, 3), (6, 2), (8, 2)]


def test_every_value_of_the_parallel_config_passes_through() -> None:
    parallel = FusedMoEParallelConfig.make(
        2, 1, 2, 2, enable_expert_parallel=True, all2all_backend="nixl_ep", tp_rank=1, dp_rank=1
    )
    made = layer_config(moe_parallel_config=parallel, num_experts=8, num_logical_experts=8, num_local_experts=2)
    own = ("all2all_backend", "enable_eplb")
    names = [f.name for f in dataclasses.fields(parallel) if f.name not in own]
    names += [name for name, value in vars(FusedMoEParallelConfig).items() if isinstance(value, property)]
    assert len(names) > 20
    for name in names:
        assert getattr(made, name) == getattr(parallel, name), name
    assert made.use_batched_activation_format and made.ep_rank == 3


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_builder_fits_the_layer_that_it_was_made_for(name: str) -> None:
    quant = build(name)
    constants = quant.gemm1_alpha is not None
    layer = layer_config(has_bias=quant.w1_bias is not None, activation="swigluoai" if constants else "silu")
    layer.validate_quant_config(quant)
    # The same tensors in a layer of other sizes are an error, whichever builder made them.
    if quant.is_block_quantized or quant.w1_bias is not None:
        with pytest.raises(ValueError, match="FusedMoEConfig: "):
            dataclasses.replace(
                layer,
                hidden_dim=HIDDEN + 512,
                intermediate_size_per_partition=INTER + 512,
                hidden_dim_unpadded=None,
                intermediate_size_per_partition_unpadded=None,
            ).validate_quant_config(quant)
    with pytest.raises(ValueError, match=r"must hold num_local_experts \(= 5\)"):
        five: dict[str, Any] = {name: 5 for name in ("num_experts", "num_local_experts", "num_logical_experts")}
        dataclasses.replace(layer, **five).validate_quant_config(quant)


def test_quant_config_against_sizes() -> None:
    layer = layer_config()
    layer.validate_quant_config(FUSED_MOE_UNQUANTIZED_CONFIG)
    linear = build("nvfp4_w4a16_moe_quant_config", w1_bias=None, w2_bias=None)
    layer.validate_quant_config(linear)
    with pytest.raises(ValueError, match=r"w1_scale must have shape \(3, 96, 4\), got \(3, 192, 4\)"):
        layer_config(activation="relu2_no_mul").validate_quant_config(linear)
    up_only = {"w1_scale": blocks(1, 16, torch.float8_e4m3fn)[0][:, :INTER]}
    no_gate = build("nvfp4_w4a16_moe_quant_config", w1_bias=None, w2_bias=None, **up_only)
    with pytest.raises(ValueError, match=r"g1_alphas must have shape \(3,\): relu2_no_mul has no gate, got \(3, 2\)"):
        layer_config(activation="relu2_no_mul").validate_quant_config(no_gate)
    with pytest.raises(ValueError, match="has_bias must be True like the quant config, got False"):
        layer.validate_quant_config(build("biased_moe_quant_config"))
    with pytest.raises(ValueError, match=r"gemm1_alpha must be None: activation 'silu' has no such constant, got 1\.5"):
        layer.validate_quant_config(FusedMoEQuantConfig.make(gemm1_alpha=1.5))
    layer.validate_quant_config(FusedMoEQuantConfig.make(gemm1_clamp_limit=7.0))
    with pytest.raises(ValueError, match="device must be cpu like the tensors of the quant config, got cuda:0"):
        layer_config(device="cuda:0").validate_quant_config(linear)


def test_channel_scales_against_sizes() -> None:
    scales = {"w1_scale": per_expert(2 * INTER + 2, 1), "w2_scale": per_expert(HIDDEN, 1)}
    quant = build("int8_w8a8_moe_quant_config", w1_bias=None, w2_bias=None, **scales)
    with pytest.raises(ValueError, match=r"w1_scale must have one scale for each of 192 rows, got \(3, 194, 1\)"):
        layer_config().validate_quant_config(quant)


def test_swizzled_scales_against_sizes() -> None:
    fp8 = torch.float8_e4m3fn
    first, second = torch.zeros(EXPERTS, 256, 4, dtype=fp8), torch.zeros(EXPERTS, 128, 8, dtype=fp8)
    name = "nvfp4_moe_quant_config"
    swizzled = {"w2_scale": second, "w1_bias": None, "w2_bias": None, "is_nvfp4_scale_swizzled": True}
    layer_config().validate_quant_config(build(name, w1_scale=first, **swizzled))
    layer_config().validate_quant_config(build(name, w1_scale=first.flatten(1), **swizzled))
    with pytest.raises(ValueError, match=r"w1_scale must have shape \(3, 192, 4\) or hold 256 x 4 swizzled scales"):
        layer_config().validate_quant_config(build(name, w1_scale=first[:, :128], **swizzled))
    said = dataclasses.replace(build(name, w1_scale=first[:, :128], **swizzled), scale_layout="swizzled")
    with pytest.raises(ValueError, match=r"w1_scale must hold 256 x 4 swizzled scales per expert .*got \(3, 128, 4\)"):
        layer_config().validate_quant_config(said)


def test_backend_names_hold_the_registry() -> None:
    missing = set(BACKENDS) - set(MOE_BACKENDS)
    assert BACKENDS and not missing, f"name in MOE_BACKENDS of torch_moe_ops/config/moe.py: {missing}"


def test_formats_agree_with_the_schemes_of_the_ops() -> None:
    """What a config accepts is what the ops accept, for every scheme that both know."""
    for fmt in FORMATS.values():
        made = FusedMoEQuantConfig.make(weight_dtype=fmt.dtype)
        scheme = SCHEMES.get(made.scheme)
        if scheme is None:
            continue
        names = set()
        for act in fmt.activations:
            names.add(FusedMoEQuantConfig.make(act, weight_dtype=fmt.dtype).act_format)
        assert set(scheme.act_formats) <= names, fmt.dtype
        if fmt.block is not None:
            assert scheme.scales is not None and scheme.scales.size == fmt.block[1]


def test_routing_names_are_re_exported() -> None:
    method = get_routing_method_type("softmax", 8, True, None, False)
    assert method is RoutingMethodType.Renormalize and layer_config(routing_method=method).routing_method == 1

"""Shared experts inside the call of the routed ones, for models that hand theirs to vLLM's layer.

Such a model has them as a block of two linears, which vLLM's runner calls beside the experts. Where they are stored as
the routed ones are, the linears keep what they loaded until the experts are prepared, which take it over; the runner
then has no shared experts any more. Which blocks compute what our experts do is known by their class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.vllm.formats import ExpertFormat
from torch_moe_ops.vllm.parameters import LayerSizes
from torch_moe_ops.weights.raw_weights import RawWeights

# silu(gate) * up between two linears; the last one times the sigmoid of `expert_gate`, where it has one.
_BLOCKS = ("DeepseekV2MLP", "Glm4MoeMLP", "Qwen2MoeMLP")
_LINEAR_INPUT_SCALES = ("input_scale", "input_global_scale")
_LINEARS = {"w13": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class SharedExperts:
    """The shared experts of a layer that can join its routed ones.

    runner: vLLM's, of the layer. block: of linears. sizes: of the block as one expert.
    """

    runner: Any
    block: Any
    sizes: LayerSizes

    def raw(self, format: ExpertFormat, act_format: str) -> RawWeights:
        """What their linears loaded, as one expert. Raises ValueError where it is not stored as `format` says."""
        return format.raw(self._tensors(format), act_format, f"shared experts of {self.runner.layer_name}")

    def check(self, format: ExpertFormat) -> None:
        """Raises ValueError where the linears have not exactly the parameters of `format`."""
        self._tensors(format)
        for matrix, name in _LINEARS.items():
            own = {n for n, _ in getattr(self.block, name).named_parameters(recurse=False)}
            known = {n.partition("_")[2] for n in format.parameters(self.sizes) if n.startswith(f"{matrix}_")}
            if more := sorted(own - known):
                raise ValueError(f"{name} of shared experts must have {sorted(known)} alone, has {more} besides")

    def check_input_scales(self, format: ExpertFormat, routed: Mapping[str, Tensor]) -> None:
        """Raises ValueError where one of both has calibrated input scales that the other one lacks.

        Args:
            routed: what the routed experts have loaded, by name of the parameter.
        """
        here, there = (_input_scales(format.fields(tensors)) for tensors in (routed, self._tensors(format)))
        if here != there:
            wanted = f"{sorted(here) or 'none'}, as the routed ones"
            raise ValueError(f"calibrated scales of shared experts must be {wanted}, got {sorted(there) or 'none'}")

    def _tensors(self, format: ExpertFormat) -> dict[str, Tensor]:
        found = {}
        for name, parameter in format.parameters(self.sizes).items():
            matrix, _, suffix = name.partition("_")
            linear = _LINEARS[matrix]
            tensor = getattr(self.block, linear)._parameters.get(suffix)
            if tensor is None and parameter.optional:
                found[name] = parameter.empty(self.device)
                continue
            got = None if tensor is None else (_sizes(tensor.shape), tensor.dtype)
            if tensor is None or got != (_sizes(parameter.shape), parameter.dtype):
                wanted = f"{parameter.dtype} of {list(_sizes(parameter.shape))}"
                raise ValueError(f"{suffix} of {linear} of shared experts must be {wanted} ({format.name}), got {got}")
            found[name] = tensor.data.reshape(parameter.shape)
        return found

    @property
    def device(self) -> torch.device:
        return next(self.block.down_proj.parameters()).device

    def leave(self) -> None:
        """Free the linears' weights, and take the shared experts from the runner."""
        for name in _LINEARS.values():
            getattr(self.block, name)._parameters.clear()
        self.runner._shared_experts = None
        self.runner._forward_entry = self.runner._select_forward()

    def columns(self, device: torch.device, first: int, count: int) -> SharedColumns:
        """Of `count` experts with ids from `first` on, which the block has become."""
        ids = torch.arange(first, first + count, dtype=torch.int32, device=device)[None]
        # The runner multiplies the sum by its factor, which is meant for the routed experts alone.
        factor = torch.full((1, 1), 1 / self.runner.routed_scaling_factor, device=device)
        return SharedColumns(ids, factor, getattr(self.block, "expert_gate", None))


@dataclass(frozen=True)
class SharedColumns:
    """The columns of routing that shared experts have.

    ids: [1, count] int32. factor: [1, 1] float32. gate: vLLM's linear from hidden states to one logit, or None.
    """

    ids: Tensor
    factor: Tensor
    gate: Any

    def behind(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """topk_ids and topk_weights [num_tokens, top_k] of the tokens x, with these columns behind them."""
        shape = x.shape[0], self.ids.shape[1]
        weights = self.factor if self.gate is None else torch.sigmoid(self.gate(x)[0]) * self.factor
        ids = torch.cat([topk_ids, self.ids.to(topk_ids.dtype).expand(shape)], 1)
        return ids, torch.cat([topk_weights, weights.to(topk_weights.dtype).expand(shape)], 1)


def _input_scales(fields: Mapping[str, Tensor | None]) -> set[str]:
    """Those that a checkpoint had."""
    return {name for name, value in fields.items() if name.endswith("_input_scale") and value is not None}


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of one: an expert's tensors and a linear's."""
    return tuple(size for size in shape if size != 1)


def shared_of(runner: Any, plan: Any) -> SharedExperts | None:
    """The shared experts of a loaded layer that can join its routed ones, which run by `plan`; None: it has none.

    Raises ValueError saying what must be so, where they have to stay beside them.
    """
    shared = runner.shared_experts
    if shared is None:
        return None
    block, experts = shared._layer, runner.routed_experts
    config = experts.moe_config
    if type(block).__name__ not in _BLOCKS:
        raise ValueError(f"the block of shared experts must be one of {list(_BLOCKS)}, got {type(block).__name__}")
    _check_layer(runner, plan, config)
    for name in _LINEARS.values():
        linear = getattr(block, name)
        if linear.bias is not None or linear.tp_size != config.moe_parallel_config.tp_size:
            raise ValueError(f"{name} of shared experts must be divided as the routed ones, without a bias")
    if config.moe_parallel_config.tp_size > 1 and block.down_proj.reduce_results:
        raise ValueError("down_proj of shared experts must leave the sum over ranks to the layer")
    found = SharedExperts(runner, block, _sizes_of(block, experts))
    found.check(plan.format)
    return found


def _sizes_of(block: Any, experts: Any) -> LayerSizes:
    down = block.down_proj
    return LayerSizes(
        experts=1,
        hidden=experts.moe_config.hidden_dim,
        intermediate=down.input_size_per_partition,
        halves=2,
        has_bias=False,
        dtype=experts.params_dtype,
    )


def _check_layer(runner: Any, plan: Any, config: Any) -> None:
    """That every rank has all routed experts, which compute what the block does, and nothing but a sum follows."""
    parallel = config.moe_parallel_config
    if plan.exchanges or parallel.ep_size > 1 or config.is_sequence_parallel:
        raise ValueError("all routed experts must be on each rank, with all tokens, got experts or tokens divided")
    if plan.options["activation"] != "silu" or plan.options["swiglu_limit"] is not None or config.has_bias:
        raise ValueError("the routed experts must have silu without a limit, and no biases, as the shared ones")
    if plan.options["router_weight_on_input"]:
        raise ValueError("routers must weigh results, got weights on the input")
    if runner.routed_input_transform is not None or runner.routed_output_transform is not None:
        raise ValueError("nothing must stand between the layer and its routed experts, got transforms")
    if runner.routed_scaling_factor != 1 and config.in_dtype == torch.float16:
        raise ValueError("hidden states must be bfloat16 where the layer scales its result, got torch.float16")


def keep_until_prepared(method: Any, runners: Mapping[str, Any], takes: Callable[[Any], bool]) -> None:
    """Make a linear's method leave what it loaded as it is where a layer's experts take it over.

    Calibrated input scales become NaN before they are loaded, as the experts' own are: vLLM leaves memory as it finds
    it, so that nobody could tell those that no file holds.

    Args:
        method: of one linear; its class stays, by which vLLM chooses how to load.
        runners: vLLM's layers by their names, as far as the model is made.
        takes: runner -> whether its experts take over the shared ones. Asked when all weights are loaded.
    """
    process = method.process_weights_after_loading

    def unless_taken(linear: Any) -> None:
        is_taken = not linear._parameters or any(_is_shared_in(linear, r) and takes(r) for r in runners.values())
        if not is_taken:
            _complete_input_scales(linear)
            process(linear)

    create = method.create_weights

    def with_marked_scales(layer: Any, *args: Any, **kwargs: Any) -> None:
        create(layer, *args, **kwargs)
        for name in _LINEAR_INPUT_SCALES:
            if (scale := layer._parameters.get(name)) is not None:
                scale.data.fill_(math.nan)

    method.process_weights_after_loading = unless_taken
    method.create_weights = with_marked_scales


def _complete_input_scales(linear: Any) -> None:
    """Give parts without an input scale that of the others: a file that holds them as one matrix has one scale.

    vLLM takes the largest of all parts, which a NaN would be.
    """
    for name in _LINEAR_INPUT_SCALES:
        scale = linear._parameters.get(name)
        if scale is not None and not (missing := scale.data.isnan()).all():
            scale.data[missing] = scale.data[~missing].max()


def _is_shared_in(linear: Any, layer: Any) -> bool:
    block = getattr(getattr(layer, "shared_experts", None), "_layer", None)
    return block is not None and any(getattr(block, name, None) is linear for name in _LINEARS.values())

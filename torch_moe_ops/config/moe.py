"""FusedMoEConfig: sizes, activation, routing and placement of one MoE layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import torch

from torch_moe_ops.config._require import require, require_bool, require_int, require_type
from torch_moe_ops.config.formats import FLOATS
from torch_moe_ops.config.parallel import FusedMoEParallelConfig
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig
from torch_moe_ops.config.sizes import OWNER, check_against_sizes
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.routing_methods import MAX_EXPERTS, MAX_TOP_K, RoutingMethodType

# The public backend names; a test holds the registry to them.
MOE_BACKENDS = (
    "auto",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "cuda_sm90",
    "cuda_sm90_bf16",
    "cuda_sm90_int4",
    "cuda_sm90_packed",
    "cuda_sm90_folded",
    "cuda_sm90_fp8",
    "triton",
    "triton_fp8",
    "cpu",
    "reference",
)


def _of_parallel(name: str) -> Any:
    """A read-only view of a value of the parallel config."""
    return property(attrgetter(f"moe_parallel_config.{name}"))


@dataclass(frozen=True)
class FusedMoEConfig:
    """One MoE layer on one rank: everything about it but its tensors.

    Sizes are logical and never change: padding that a backend needs is kept by PreparedWeights.

    Args:
        num_experts: global number of (physical) experts, at most 2048.
        experts_per_token: top_k, at most 32, num_experts and num_logical_experts.
        hidden_dim: K of the first GEMM; a latent size need not be the model's hidden size.
        intermediate_size_per_partition: per expert, after gating, this rank's share.
        num_local_experts: this rank's share of num_experts.
        num_logical_experts: without the replicas of re-balancing, at most num_experts.
        activation: name, e.g. "silu", or a member of an enum that has it as its value (the name is kept);
            it also says whether w13 has gate rows.
        device: torch.device or its name.
        routing_method: RoutingMethodType.
        moe_parallel_config: FusedMoEParallelConfig.
        in_dtype: of the hidden states: bfloat16, float16 or float32.
        router_logits_dtype: float dtype; None: in_dtype.
        hidden_dim_unpadded, intermediate_size_per_partition_unpadded: where the checkpoint was padded
            already, the sizes before; None: the same. At most the sizes above.
        moe_backend: "auto" or the name of a backend.
        max_num_tokens: of one call, at least 1.
        has_bias: whether the experts have biases.
        is_act_and_mul: follows from `activation`; None, or the same answer.
        is_lora_enabled: must be False: no backend applies LoRA adapters inside the experts.
        disable_inplace: the ops never write their input; accepted either way.

    Raises:
        ValueError, TypeError: naming the field, what it must be and what came.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    num_logical_experts: int
    activation: str
    device: torch.device | str
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    router_logits_dtype: torch.dtype | None = None
    # By keyword only: some releases of the field have them here and some do not, and what follows is passed by place.
    hidden_dim_unpadded: int | None = dataclasses.field(default=None, kw_only=True)
    intermediate_size_per_partition_unpadded: int | None = dataclasses.field(default=None, kw_only=True)
    moe_backend: str = "auto"
    max_num_tokens: int = 256
    has_bias: bool = False
    is_act_and_mul: bool | None = None
    is_lora_enabled: bool = False
    disable_inplace: bool = True

    def __post_init__(self) -> None:
        self._check_kinds()
        self._fill_defaults()
        self._check_sizes()
        self._check_dtypes()
        self._check_flags()

    def _check_kinds(self) -> None:
        parallel, method = self.moe_parallel_config, self.routing_method
        require_type(
            isinstance(parallel, FusedMoEParallelConfig),
            OWNER,
            "moe_parallel_config",
            "be a FusedMoEParallelConfig",
            parallel,
        )
        require_type(isinstance(method, RoutingMethodType), OWNER, "routing_method", "be a RoutingMethodType", method)
        if isinstance(self.activation, Enum):  # the field's own, by the name that is its value
            object.__setattr__(self, "activation", self.activation.value)
        known = isinstance(self.activation, str) and self.activation in ACTIVATIONS
        require(known, OWNER, "activation", f"be one of {', '.join(ACTIVATIONS)}", self.activation)
        require_type(isinstance(self.device, (str, torch.device)), OWNER, "device", "be a device", self.device)

    def _fill_defaults(self) -> None:
        gated = ACTIVATIONS[self.activation].is_gated
        text = f"be {gated} (or None) for activation {self.activation!r}"
        require(self.is_act_and_mul in (None, gated), OWNER, "is_act_and_mul", text, self.is_act_and_mul)
        values = {"device": _device(self.device), "is_act_and_mul": gated}
        for field, source in (
            ("router_logits_dtype", "in_dtype"),
            ("hidden_dim_unpadded", "hidden_dim"),
            ("intermediate_size_per_partition_unpadded", "intermediate_size_per_partition"),
        ):
            if getattr(self, field) is None:
                values[field] = getattr(self, source)
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def _check_sizes(self) -> None:
        require_int(OWNER, "num_experts", self.num_experts, 1, MAX_EXPERTS)
        require_int(OWNER, "num_logical_experts", self.num_logical_experts, 1, self.num_experts)
        limit = min(MAX_TOP_K, self.num_logical_experts)
        require_int(OWNER, "experts_per_token", self.experts_per_token, 1, limit)
        for name in ("hidden_dim", "intermediate_size_per_partition"):
            require_int(OWNER, name, getattr(self, name), 1)
            require_int(OWNER, f"{name}_unpadded", getattr(self, f"{name}_unpadded"), 1, getattr(self, name))
        require_int(OWNER, "max_num_tokens", self.max_num_tokens, 1)
        require_int(OWNER, "num_local_experts", self.num_local_experts, 1)
        parallel = self.moe_parallel_config
        _, count = parallel.local_experts(self.num_experts)
        text = (
            f"be {count}: the share of ep_rank {parallel.ep_rank} of {parallel.ep_size} in {self.num_experts} experts"
        )
        require(self.num_local_experts == count, OWNER, "num_local_experts", text, self.num_local_experts)

    def _check_dtypes(self) -> None:
        names = [str(d) for d in FLOATS]
        for field in ("in_dtype", "router_logits_dtype"):
            value = getattr(self, field)
            require_type(isinstance(value, torch.dtype), OWNER, field, "be a torch.dtype", value)
            require(value in FLOATS, OWNER, field, f"be one of {', '.join(names)}", value)

    def _check_flags(self) -> None:
        for field in ("has_bias", "is_lora_enabled", "disable_inplace"):
            require_bool(OWNER, field, getattr(self, field))
        known = isinstance(self.moe_backend, str) and self.moe_backend in MOE_BACKENDS
        require(known, OWNER, "moe_backend", f"be one of {', '.join(MOE_BACKENDS)}", self.moe_backend)
        text = "be False: no backend applies LoRA adapters inside the experts"
        require(not self.is_lora_enabled, OWNER, "is_lora_enabled", text, self.is_lora_enabled)

    @property
    def is_gated(self) -> bool:
        """Whether w13 holds gate and up rows; from the activation."""
        return ACTIVATIONS[self.activation].is_gated

    @property
    def local_expert_offset(self) -> int:
        """The first global expert of this rank, linear placement."""
        return self.moe_parallel_config.local_experts(self.num_experts)[0]

    def validate_quant_config(self, quant_config: FusedMoEQuantConfig) -> None:
        """Raise ValueError where the tensors of a quant config do not fit this layer's sizes and activation."""
        check_against_sizes(self, quant_config)

    tp_size = _of_parallel("tp_size")
    tp_rank = _of_parallel("tp_rank")
    pcp_size = _of_parallel("pcp_size")
    pcp_rank = _of_parallel("pcp_rank")
    dp_size = _of_parallel("dp_size")
    dp_rank = _of_parallel("dp_rank")
    ep_size = _of_parallel("ep_size")
    ep_rank = _of_parallel("ep_rank")
    sp_size = _of_parallel("sp_size")
    use_ep = _of_parallel("use_ep")
    is_sequence_parallel = _of_parallel("is_sequence_parallel")
    use_all2all_kernels = _of_parallel("use_all2all_kernels")
    use_batched_activation_format = _of_parallel("use_batched_activation_format")
    use_deepep_ht_kernels = _of_parallel("use_deepep_ht_kernels")
    use_deepep_ll_kernels = _of_parallel("use_deepep_ll_kernels")
    use_fi_all2allv_kernels = _of_parallel("use_fi_all2allv_kernels")
    use_fi_nvl_two_sided_kernels = _of_parallel("use_fi_nvl_two_sided_kernels")
    use_fi_nvl_one_sided_kernels = _of_parallel("use_fi_nvl_one_sided_kernels")
    use_naive_all2all_kernels = _of_parallel("use_naive_all2all_kernels")
    use_mori_kernels = _of_parallel("use_mori_kernels")
    use_nixl_ep_kernels = _of_parallel("use_nixl_ep_kernels")
    use_deepep_v2_kernels = _of_parallel("use_deepep_v2_kernels")
    use_ag_rs_all2all_kernels = _of_parallel("use_ag_rs_all2all_kernels")


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"{OWNER}: device must be a device that torch knows, got {device!r}") from None

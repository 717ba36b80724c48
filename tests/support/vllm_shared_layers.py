"""vLLM's whole layer with shared experts, loaded by its own loaders, on a CPU; and what it has to give.

vLLM has kernels for few quantized linears on a CPU. Here linears do not ask for one: they only load.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from quantized_models import FORMATS
from torch import Tensor, nn

from torch_moe_ops.vllm import registration

EXPERTS, TOP_K, HIDDEN, SIZE = 6, 2, 128, 128
BLOCK = "model.layers.0.mlp"
_KERNELS = re.compile(r"(init_\w+_linear_kernel|choose_mp_linear_kernel)$")


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Groups of one process, which linears ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears of every format can be made."""
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.layers.quantization.fp8
    import vllm.model_executor.layers.quantization.modelopt  # noqa: F401

    kernel = MagicMock()
    kernel.__name__ = "NoKernel"
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.model_executor.layers.quantization."):
            for attribute in filter(_KERNELS.match, vars(module).copy()):
                monkeypatch.setattr(module, attribute, lambda *args, **kwargs: kernel)


class Layer:
    """A layer of vLLM and the values of its weights.

    Args:
        format_name: of quantized_models.FORMATS.
        width: of the block of shared experts, in widths of a routed one.
        gated: the block has a gate, as Qwen2-MoE's.
        factor: what the layer's result is multiplied by.
        shared_format: another format for the block.
        calibrated: which of "routed" and "shared" have scales of their inputs; None: as the format is written.
    """

    def __init__(
        self,
        format_name: str,
        width: float = 1,
        gated: bool = False,
        factor: float = 1.0,
        shared_format: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        calibrated: tuple[str, ...] | None = None,
        **options: Any,
    ) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers import fused_moe
        from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP
        from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

        self.width, self.gate, self.factor, self.dtype = width, _Gate() if gated else None, factor, dtype
        self.encode, self.encode_shared = FORMATS[format_name][0], FORMATS[shared_format or format_name][0]
        self.calibrated = calibrated
        self.config = VllmConfig()
        self.config.model_config = MagicMock(dtype=dtype, quantization_config=None)
        made = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
        with set_current_vllm_config(self.config), _default(dtype):
            block: dict[str, Any] = {"reduce_results": False, "prefix": f"{BLOCK}.shared_experts"}
            block |= {"quant_config": _config_of(shared_format or format_name)}
            kind = Qwen2MoeMLP if gated else DeepseekV2MLP
            more = {"expert_gate": self.gate} if gated else {}
            self.block = kind(HIDDEN, int(width * SIZE), "silu", **block, **more)
            self.runner = made(
                num_experts=EXPERTS,
                top_k=TOP_K,
                hidden_size=HIDDEN,
                intermediate_size=SIZE,
                params_dtype=dtype,
                renormalize=True,
                quant_config=_config_of(format_name),
                shared_experts=self.block,
                routed_scaling_factor=factor,
                apply_routed_scale_to_output=factor != 1,
                prefix=f"{BLOCK}.experts",
                **options,
            )
            self.routed, self.shared = self._load_routed(), self._load_shared()

    def process(self) -> None:
        """As vLLM does when everything is loaded, in its order."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            for module in (self.block.gate_up_proj, self.block.down_proj, self.runner.routed_experts):
                module.quant_method.process_weights_after_loading(module)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, self.config):
            return self.runner(x, logits)

    def expected(self, x: Tensor, logits: Tensor) -> Tensor:
        """Routed and shared experts in float32."""
        weights, ids = logits.float().softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True) * self.factor
        wide, total = x.float(), torch.zeros(x.shape)
        for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(TOP_K)):
            total[token] += weights[token, slot] * _mlp(wide[token], *self.routed[ids[token, slot]])
        gate = 1.0 if self.gate is None else torch.sigmoid(self.gate(x)[0].float())
        return total + gate * _mlp(wide, *self.shared)

    def _calibrate(self, parts: dict[str, Tensor], side: str) -> None:
        if self.calibrated is None:
            return
        for name in ("input_scale", "input_global_scale"):
            parts.pop(name, None)
        if side in self.calibrated:  # compressed-tensors' divides
            compressed = "weight_global_scale" in parts
            parts |= {"input_global_scale": torch.tensor(40.0)} if compressed else {"input_scale": torch.tensor(0.025)}

    def _load_routed(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        experts, meant = self.runner.routed_experts, []
        for number in range(EXPERTS):
            values = []
            for which, projection, shape in _matrices(SIZE):
                parts, meaning = self.encode(_random(shape))
                values.append(meaning)
                self._calibrate(parts, "routed")
                for part, tensor in parts.items():
                    name = f"{'w2' if projection == 'down_proj' else 'w13'}_{part}"
                    parameter, full = getattr(experts, name), f"{BLOCK}.experts.{name}"
                    assert experts.weight_loader(parameter, tensor, full, which, number, return_success=True)
            meant.append(tuple(values))
        return meant

    def _load_shared(self) -> tuple[Tensor, Tensor, Tensor]:
        values = []
        for which, _, shape in _matrices(int(self.width * SIZE)):
            parts, meaning = self.encode_shared(_random(shape))
            values.append(meaning)
            self._calibrate(parts, "shared")
            for part, tensor in parts.items():
                linear = self.block.down_proj if which == "w2" else self.block.gate_up_proj
                parameter = linear._parameters[part]
                shard = {"w1": (0,), "w3": (1,), "w2": ()}[which]
                parameter.weight_loader(parameter, tensor, *shard)
        return tuple(values)  # type: ignore[return-value]


class _Gate(nn.Module):
    """Hidden states -> (one logit, no bias), as vLLM's linears give them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, HIDDEN) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T.to(x.dtype), None


def _matrices(size: int) -> list[tuple[str, str, tuple[int, int]]]:
    """(vLLM's word for it, the checkpoint's, [rows, columns])."""
    up = (size, HIDDEN)
    return [("w1", "gate_proj", up), ("w3", "up_proj", up), ("w2", "down_proj", (HIDDEN, size))]


def _random(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape) * 1.5 * shape[1] ** -0.5


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (nn.functional.silu(x @ gate.float().T) * (x @ up.float().T)) @ down.float().T


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _config_of(format_name: str) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    registration.register()
    settings = FORMATS[format_name][1]
    name = settings["quant_method"]
    if name == "modelopt" and settings["quant_algo"] != "FP8":
        name = "modelopt_fp4"
        settings = {**settings, "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}
    config = get_quantization_config(name).from_config(settings)
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return config

"""The experts implementation "moeq": a transformers experts module that calls torch.ops.moeq."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.restoring import restored_views
from torch_moe_ops.prepared.shared_experts import append_shared_experts
from torch_moe_ops.prepared.state import SETTINGS, prepared_of, require_same_layer, state_of, take_over

IMPLEMENTATION = "moeq"
HOLDER = "moeq_weights"  # attribute of an experts module


class ExpertWeights(nn.Module):
    """Holds the prepared weights of one layer, shows them to the model, and moves them with it.

    Its buffers are the tensors of `prepared`, in whatever dtype the op needs: they count where memory is counted, and
    `model.half()` leaves them alone. `state_dict` has them too, with a text of what else `prepared` says.

    Args:
        prepared: the layer.
        backend: asked of `prepare` again when the model moves to another kind of device; None: as it was then.
    """

    def __init__(self, prepared: PreparedWeights, backend: str | None = None) -> None:
        super().__init__()
        self.prepared = prepared
        self.backend = prepared.requested if backend is None else backend

    @property
    def prepared(self) -> PreparedWeights:
        return self._prepared

    @prepared.setter
    def prepared(self, w: PreparedWeights) -> None:
        self._prepared = w
        self._buffers.clear()
        self._buffers.update(w.tensors())
        self._non_persistent_buffers_set.update(self._buffers)  # saved and loaded by the methods below

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertWeights:
        """Follow `model.to(device)`: a backend's layout serves one kind of device, so another one prepares anew."""
        w = self.prepared
        probe = fn(torch.empty(0, device=w.device, dtype=torch.bfloat16))
        device, taken = probe.device, BACKENDS[w.backend].hidden_dtypes
        if device.type == w.device.type and probe.dtype not in taken:
            names = [str(dtype) for dtype in taken]
            raise ValueError(
                f"experts on {w.device} (backend {w.backend!r}) take hidden states of {names}: "
                f"the model cannot be made {probe.dtype}"
            )
        if w.device.type == "meta" and device.type != "meta":
            raise ValueError(
                f"experts on the meta device have no data to move to {device}: "
                "load_state_dict(..., assign=True) gives them some"
            )
        if device.type in (w.device.type, "meta"):
            self.prepared = w.to(device) if device != w.device else w
            return self
        self.prepared = prepare(restored_views(w), backend=self.backend, device=device, **w.options())
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({f"{prefix}{name}": t for name, t in state_of(self.prepared).items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """In place: what `prepared` was stays at its addresses, unless `assign` asks for the given tensors."""
        own = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        missing = sorted(state_of(self.prepared).keys() - own.keys())
        if SETTINGS not in own:
            missing_keys.extend(f"{prefix}{name}" for name in missing)
            return
        try:
            given = prepared_of(prefix.removesuffix("."), own)
            if local_metadata.get("assign_to_params_buffers", False):
                require_same_layer(self.prepared, given)
                self.prepared = given
            else:
                take_over(self.prepared, given)
        except ValueError as error:
            error_msgs.append(str(error))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """num_experts without shared ones, hidden_size, intermediate_size."""
        w = self.prepared
        return w.num_experts - w.num_shared_experts, w.hidden_size, w.intermediate_size

    def run(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return fused_moe_routed(hidden_states, topk_ids, topk_weights, self.prepared)

    def extra_repr(self) -> str:
        w = self.prepared
        return (
            f"{w.scheme}, num_experts={w.num_experts}, hidden_size={w.hidden_size}, "
            f"intermediate_size={w.intermediate_size}, act_format={w.act_format}, backend={w.backend}"
        )


def moeq_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module under experts_implementation="moeq".

    Args:
        self: an experts module of transformers that holds `moeq_weights` (see `attach_experts`).
        hidden_states: [num_tokens, hidden_size].
        top_k_index: [num_tokens, top_k] int64; an id of num_experts or more (how transformers marks the
            experts of other ranks) or below 0 contributes nothing.
        top_k_weights: [num_tokens, top_k], final multipliers.

    Returns: [num_tokens, hidden_size] in the dtype of hidden_states. Differentiable. Traces under torch.compile.
    Raises: RuntimeError where the module has no prepared weights, or naming op and argument.
    """
    weights = getattr(self, "moeq_weights", None)
    if weights is None:
        raise RuntimeError(
            f"experts_implementation {IMPLEMENTATION!r}: {type(self).__name__} must hold prepared weights, got none: "
            "call torch_moe_ops.transformers.attach_experts(model, checkpoint) first, or quantize_model(model, scheme) "
            "(scheme 'none' keeps the weights that it has)"
        )
    if isinstance(weights, ExpertWeights) and weights.prepared.num_shared_experts:
        top_k_index, top_k_weights = _with_shared(weights, hidden_states, top_k_index, top_k_weights)
    return weights.run(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _with_shared(weights: Any, hidden_states: Tensor, ids: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """ids and factors with the columns of shared experts (shared_experts.py)."""
    block = weights.shared_gate_of[0]
    of_tokens = None if block is None else torch.sigmoid(block.shared_expert_gate(hidden_states))
    return append_shared_experts(ids, factors, weights.prepared, of_tokens)

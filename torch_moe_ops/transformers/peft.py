"""PEFT adapters on packed experts: `LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...])`.

PEFT wraps an experts module once for each parameter and, in every forward pass, adds the adapters' product to the
parameter. Packed experts have no such parameter: `prepare_for_peft` shows PEFT tensors of its shape that take no
memory, and PEFT's wrappers hand their factors to the module instead, which runs them beside the packed weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.prepared.lora import Lora
from torch_moe_ops.prepared.merge_aware import MergeAware
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.restoring import restored_views
from torch_moe_ops.transformers.adapters import is_adapted
from torch_moe_ops.transformers.experts import HOLDER
from torch_moe_ops.transformers.modules import ExpertsModule, find_experts
from torch_moe_ops.weights.lora_layouts import from_peft
from torch_moe_ops.weights.merge_lora import merge_lora

_ACTIVE = "moeq_active_lora"  # attribute of a module in a forward pass: {parameter: factors}
_DTYPE = "moeq_lora_dtype"
_MERGED = "moeq_merge_aware"


class Factors(NamedTuple):
    """What PEFT adds to one parameter: scaling * B @ A of each expert, A [experts, r, in] and B [experts, out, r]."""

    a: Tensor
    b: Tensor
    scaling: float
    sources: tuple[Tensor, ...]  # PEFT's matrices


def prepare_for_peft(model: Any, *, merge_aware: bool = False) -> Any:
    """Let PEFT put LoRA on the packed experts of a transformers model. Before `get_peft_model` or `PeftModel`.

    `target_parameters` are named as in the unquantized model: "mlp.experts.gate_up_proj", "mlp.experts.down_proj".
    Checkpoints of adapters are PEFT's own, and fit the unquantized model too. `merge_and_unload` quantizes the merged
    experts again (`merge_lora`), in place; they cannot be unmerged. Only what PEFT itself does not refuse for
    parameters: no dropout, bias, DoRA.

    Args:
        model: has packed experts (`register`, `attach_experts`, `quantize_model`). May be called again.
        merge_aware: run the experts with the active adapter merged and quantized, in training too, so that what was
            trained is what `merge_and_unload` leaves, bit for bit (`moe.MergeAware`: at most one active adapter, twice
            the packed weights, experts quantized after every step).

    Returns: the model.
    Raises:
        ImportError: no peft with `target_parameters`.
        ValueError: no packed experts; experts that do not run through the experts interface (Llama 4), or hold shared
            ones too.
    """
    _intercept_wrappers()
    packed = [found for found in find_experts(model) if hasattr(found.module, HOLDER)]
    if not packed:
        raise ValueError(f"prepare_for_peft: model must have packed experts, got {type(model).__name__} without")
    for found in packed:
        if is_adapted(found.module):
            raise ValueError(
                f"prepare_for_peft: {found.name} must run through the experts interface of transformers, got "
                f"{type(found.module).__name__}"
            )
        if shared := getattr(found.module, HOLDER).prepared.num_shared_experts:
            raise ValueError(
                f"prepare_for_peft: {found.name} must hold routed experts alone, got {shared} shared ones inside: "
                "attach_experts or register with shared_experts=False leaves them beside"
            )
    dtype = _dtype_of(model)
    for found in packed:
        _show_parameters(found, dtype)
        if not merge_aware:
            _as_it_was(found.module)
        elif _MERGED not in found.module.__dict__:
            found.module.__dict__[_MERGED] = None  # made by the first forward pass with an adapter
    return model


def _as_it_was(module: Any) -> None:
    module.__dict__.pop(_MERGED, None)


def _merged_weights(module: Any, active: dict[str, Factors]) -> PreparedWeights:
    """The weights of a module with its active adapter merged, beside those that it has now: moving it gives it others.

    The module's own stay what they are: for passes without the adapter, and for whoever saves the model.
    """
    merged: MergeAware | None = module.__dict__[_MERGED]
    if merged is None or merged.origin is not _weights_of(module):
        module.__dict__[_MERGED] = None  # before there are two
        merged = module.__dict__[_MERGED] = MergeAware.beside(_weights_of(module))
    adapters = [_lora_of(module, {name: factors}) for name, factors in active.items()]
    merged.update(*adapters, sources=[t for factors in active.values() for t in factors.sources])
    return merged.w


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _show_parameters(found: ExpertsModule, dtype: torch.dtype) -> None:
    module = found.module
    module.__dict__[_DTYPE] = dtype
    if not isinstance(module, _Shown):
        kind: Any = type(module)
        module.__class__ = _with_parameters(kind, module.has_gate)


class _Shown:
    """Mixed into the class of an experts module."""

    @property
    def weight(self) -> Tensor:
        """Where PEFT looks for the device of what it wraps."""
        return torch.empty(0, dtype=self.__dict__[_DTYPE], device=_weights_of(self).device)

    @property
    def down_proj(self) -> Tensor:
        return _shape_alone(self, "down_proj")

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """As PEFT asks, without recursion, the shapes come too; nobody else sees them: not `parameters()` of a model,
        its state_dict, its optimizers."""
        if not recurse:
            for name in _names(self):
                yield f"{prefix}.{name}" if prefix else name, getattr(self, name)
        yield from super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        active: dict[str, Factors] = self.__dict__.get(_ACTIVE) or {}
        if not active:
            return super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc,no-any-return]
        merged = _MERGED in self.__dict__
        w = _merged_weights(self, active) if merged else _weights_of(self)
        lora, options = _lora_of(self, active), dict[str, Any](lora_merged=merged)
        return fused_moe_routed(hidden_states, top_k_index, top_k_weights, w, lora=lora, **options)


class _Gated(_Shown):
    @property
    def gate_up_proj(self) -> Tensor:
        return _shape_alone(self, "gate_up_proj")


class _Ungated(_Shown):
    @property
    def up_proj(self) -> Tensor:
        return _shape_alone(self, "up_proj")


@functools.cache
def _with_parameters(kind: Any, gated: bool) -> Any:
    """A subclass under the same name: messages and look-ups by name see what was there."""
    return type(kind.__name__, (_Gated if gated else _Ungated, kind), {"__module__": kind.__module__})


def _names(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _weights_of(module: Any) -> PreparedWeights:
    return getattr(module, HOLDER).prepared  # type: ignore[no-any-return]


def _shape_alone(module: Any, name: str) -> Tensor:
    """A tensor of the shape that the parameter had, all of whose elements are one."""
    w = _weights_of(module)
    halves = 2 if module.has_gate else 1
    shape = (
        (w.hidden_size, w.intermediate_size) if name == "down_proj" else (halves * w.intermediate_size, w.hidden_size)
    )
    shape = shape[::-1] if module.is_transposed else shape
    one = torch.zeros(1, dtype=module.__dict__[_DTYPE], device=w.device)
    return one.expand(w.num_local_experts, *shape)


def _lora_of(module: Any, active: dict[str, Factors]) -> Lora:
    """The adapters of a module's parameters as the op takes them."""
    scalings = {factors.scaling for factors in active.values()}
    scaling = scalings.pop() if len(scalings) == 1 else 1.0
    named: dict[str, Tensor] = {}
    for name, factors in active.items():
        which, b = ("2" if name == "down_proj" else "13"), factors.b
        if which == "13" and module.has_gate and not module.is_concatenated:
            b = torch.cat((b[:, 0::2], b[:, 1::2]), 1)
        named |= {f"a{which}": factors.a, f"b{which}": b if factors.scaling == scaling else b * factors.scaling}
    return Lora(**named, scaling=scaling)


def _factors_of(wrapper: Any, adapters: list[str]) -> Factors:
    """The sum of several adapters: their ranks side by side, B scaled."""
    found = []
    for adapter in adapters:
        sources = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        found.append(Factors(*from_peft(*sources, wrapper.num_experts), wrapper.scaling[adapter], sources))
    if len(found) == 1:
        return found[0]
    return Factors(torch.cat([f.a for f in found], 1), torch.cat([f.b * f.scaling for f in found], 2), 1.0, ())


def _packed(wrapper: Any) -> Any:
    """The packed experts that a wrapper of PEFT is for, None where it is for something else."""
    module = wrapper.get_base_layer()
    return module if isinstance(module, _Shown) and wrapper.parameter_name in _names(module) else None


def _intercept_wrappers() -> None:
    """Make PEFT's wrappers of parameters know packed experts. May be called again."""
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        raise ImportError(f"prepare_for_peft needs peft with target_parameters (0.17 or later): {error}") from error
    for name, ours in (("_activate_lora", _activate_lora), ("merge", _merge), ("unmerge", _unmerge)):
        theirs = getattr(ParamWrapper, name, None)
        if theirs is None:
            raise ImportError(f"prepare_for_peft does not know this release of peft: no ParamWrapper.{name}")
        if not hasattr(theirs, "moeq_original"):
            setattr(ParamWrapper, name, _instead(theirs, ours))


def _instead(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = _packed(self)
        return theirs(self, *args, **kwargs) if module is None else ours(self, module, *args, **kwargs)

    method.moeq_original = theirs  # type: ignore[attr-defined]
    return method


@contextlib.contextmanager
def _activate_lora(wrapper: Any, module: Any, active_adapters: list[str]) -> Iterator[None]:
    """While it lasts, the module runs these adapters."""
    adapters = [name for name in active_adapters or () if name in wrapper.lora_A]
    if len(adapters) > 1 and _MERGED in module.__dict__:
        raise ValueError(f"merge_aware: at most one adapter must be active, got {adapters}")
    before = module.__dict__.get(_ACTIVE)
    if adapters:
        module.__dict__[_ACTIVE] = {**(before or {}), wrapper.parameter_name: _factors_of(wrapper, adapters)}
    try:
        yield
    finally:
        module.__dict__[_ACTIVE] = before


@torch.no_grad()
def _merge(wrapper: Any, module: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """Quantize the experts with the adapters added, in place. `merge_lora` always checks what `safe_merge` asks for."""
    from peft.tuners.tuners_utils import check_adapters_to_merge

    names = [name for name in check_adapters_to_merge(wrapper, adapter_names) if name in wrapper.lora_A]
    if not names:
        return
    w = _weights_of(module)
    _as_it_was(module)
    lora = _lora_of(module, {wrapper.parameter_name: _factors_of(wrapper, names)}).to(w.device)
    w.update_(merge_lora(restored_views(w), lora.a13, lora.b13, lora.a2, lora.b2, scaling=float(lora.scaling)))
    wrapper.merged_adapters.extend(names)


def _unmerge(wrapper: Any, module: Any) -> None:
    if wrapper.merged:
        raise ValueError(
            f"unmerge: {wrapper.parameter_name} must not be merged, got packed experts, whose values before they were "
            "quantized again are gone: load the model anew"
        )

"""load_experts: a checkpoint's experts as RawWeights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import overload

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.buffers import LayerBuffers, fill
from torch_moe_ops.checkpoints.index import CheckpointIndex, open_checkpoint
from torch_moe_ops.checkpoints.layer import LayerSource
from torch_moe_ops.checkpoints.model_config import activation_fields
from torch_moe_ops.checkpoints.naming import ExpertLayer, select_layer
from torch_moe_ops.checkpoints.progress import track
from torch_moe_ops.checkpoints.shared_experts import with_shared_of
from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.files.tensor_reader import TensorReader
from torch_moe_ops.weights.raw_weights import RawWeights


@overload
def load_experts(
    path: str | os.PathLike[str],
    layer: int,
    *,
    mtp: bool = ...,
    device: torch.device | str = ...,
    input_scales: bool = ...,
    shared_experts: bool = ...,
) -> RawWeights: ...


@overload
def load_experts(
    path: str | os.PathLike[str],
    layer: None,
    *,
    mtp: bool = ...,
    device: torch.device | str = ...,
    input_scales: bool = ...,
    shared_experts: bool = ...,
) -> Iterator[RawWeights]: ...


def load_experts(
    path: str | os.PathLike[str],
    layer: int | None,
    *,
    mtp: bool = False,
    device: torch.device | str = "cpu",
    input_scales: bool = True,
    shared_experts: bool = False,
) -> RawWeights | Iterator[RawWeights]:
    """The routed experts of one layer of a checkpoint, or of all layers one by one.

    The format is recognised from the tensors. Whatever it stores (interleaved or transposed matrices, reciprocal
    scales, other packings) is normalised once, here; RawWeights says what comes out. Scales keep their values:
    none is merged, rounded or re-based, reciprocals are taken once in float32.

    Args:
        path: a folder with model.safetensors, or with shards and model.safetensors.index.json, or one
            .safetensors file. Nothing else is read: pickle files can run code. Or the name of a repository of the
            Hugging Face Hub, "org/name" or "org/name@revision", whose files come through huggingface_hub's cache.
        layer: n of `layers.<n>.` under any prefix. None: an iterator over every layer that has experts, in
            ascending order; `source` of each ends in "layer <n>".
        mtp: also find multi-token-prediction layers (`mtp.<n>`, or `layers.<n>` beyond the model's own). Where a
            number belongs to both kinds, the prediction layer is meant; an iterator yields them last.
        device: where the result lives. Data goes there expert by expert: peak memory is the result and one
            projection.
        input_scales: False leaves calibrated activation scales unread, so that a file with uncalibrated experts
            can be used weight-only or with dynamic scales.
        shared_experts: True also reads the layer's shared experts (`shared_experts` or `shared_expert` beside
            `experts`) and puts them behind the routed ones, as `with_shared_experts` does; while that happens the layer
            is in memory twice. A gate of theirs (`shared_expert_gate`) stays the model's.

    Raises:
        CheckpointError: (a ValueError) naming file, tensor and expert: damaged files; experts, projections or
            tensors that are missing or that nothing uses; scalar scales that are zero, negative, infinite or NaN, an
            expert's block or row scales likewise, though single ones may be zero; NaN in codes, weights or biases;
            a layer without experts (the text lists those that have them); shared experts that were asked for and are
            not there, or not of the routed ones' scheme, sizes and kinds of scales; a config that contradicts itself;
            what exceeds a limit of `files/limits.py`.
        TypeError: layer is neither an int nor None.
    """
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int)):
        raise TypeError(f"load_experts: layer must be an int or None, got {type(layer).__name__}")
    index = open_checkpoint(path)
    if not any(mtp or not found.mtp for found in index.layers):
        hint = ", only multi-token-prediction layers (mtp=True)" if index.layers else ""
        raise CheckpointError(f"{index.path}: no layer has experts{hint}")
    if layer is not None:
        names = select_layer(index.layers, layer, mtp, index.path)
        return _load(index, names, device, input_scales, shared_experts)
    chosen = [found for found in index.layers if mtp or not found.mtp]
    return (_load(index, found, device, input_scales, shared_experts) for found in chosen)


def _load(
    index: CheckpointIndex,
    names: ExpertLayer,
    device: torch.device | str,
    input_scales: bool,
    shared_experts: bool,
) -> RawWeights:
    def read(source: LayerSource) -> RawWeights:
        buffers = LayerBuffers(source.num_experts, device)
        for expert in track(range(source.num_experts), f"{os.path.basename(index.path)} layer {names.number}"):
            fill(source, expert, buffers)
        return _raw_weights(source, buffers)

    with TensorReader(index) as reader:
        raw = read(LayerSource(reader, names, input_scales))
    return with_shared_of(raw, index, names, input_scales, read) if shared_experts else raw


def describe_layer(index: CheckpointIndex, names: ExpertLayer, *, quick: bool = False) -> tuple[str, RawWeights]:
    """Name of the format, and RawWeights on the meta device, after every check that loading makes.

    Args:
        quick: read only the first expert, the others by header.

    Raises:
        CheckpointError: as load_experts.
    """
    with TensorReader(index) as reader:
        source = LayerSource(reader, names)
        buffers = LayerBuffers(source.num_experts, "meta")
        experts = range(1 if quick else source.num_experts)
        for expert in track(experts, f"{os.path.basename(index.path)} layer {names.number}"):
            fill(source, expert, buffers)
        return source.format.name, _raw_weights(source, buffers)


def _raw_weights(source: LayerSource, buffers: LayerBuffers) -> RawWeights:
    w13, w2 = buffers.pop("w13"), buffers.pop("w2")
    if w13 is None or w2 is None:
        raise CheckpointError(f"{source.where}: holds no experts")
    w2_scale_2 = buffers.pop("w2_scale_2")
    # A symmetric GPTQ file stores its zero points all the same.
    w13_zero_point, w2_zero_point = (
        (None, None) if buffers.is_symmetric else (buffers.pop("w13_zero_point"), buffers.pop("w2_zero_point"))
    )
    try:
        return RawWeights(
            scheme=source.scheme,
            w13=w13,
            w2=w2,
            w13_scale=buffers.pop("w13_scale"),
            w2_scale=buffers.pop("w2_scale"),
            w13_scale_2=buffers.pop("w13_scale_2"),
            w2_scale_2=None if w2_scale_2 is None else w2_scale_2.squeeze(1),
            a13_input_scale=_input_scale(source, buffers.pop("a13_input_scale"), source.projections[0]),
            a2_input_scale=_input_scale(source, buffers.pop("a2_input_scale"), "down"),
            w13_zero_point=w13_zero_point,
            w2_zero_point=w2_zero_point,
            w13_bias=buffers.pop("w13_bias"),
            w2_bias=buffers.pop("w2_bias"),
            source=source.where,
            **activation_fields(source.config, is_gated=source.is_gated, is_gpt_oss=source.is_gpt_oss),
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(str(error)) from error


def _input_scale(source: LayerSource, scale: Tensor | None, projection: str) -> Tensor | None:
    """[num_experts, 1] -> [num_experts], or [] where the file keeps one for the whole layer."""
    if scale is None:
        return None
    linear = source.linear(0, projection)
    shared = any(part in linear and linear.is_shared(part) for part in ("input_scale", "input_global_scale"))
    return scale[0, 0].clone() if shared else scale.squeeze(1)

"""restore: from a backend's layout back to raw weights."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared.fields import PreparedFields
from torch_moe_ops.prepared.posed import to_text
from torch_moe_ops.prepared.problem import problem_of
from torch_moe_ops.prepared.tensors import KEPT, own_memory
from torch_moe_ops.weights.raw_weights import RawWeights


def sizes_of(w: PreparedFields) -> Sizes:
    """The logical sizes of a prepared layer."""
    gated = ACTIVATIONS[w.activation].is_gated
    return Sizes(w.num_local_experts, w.hidden_size, w.intermediate_size, gated, w.w13.dtype)


def posed_of_tensors(w: PreparedFields) -> str:
    """`w.posed` for weights that came without it, from what the checkpoint's tensors were; asked for as "auto".

    As accurate as their backend is, so that whoever prepares them again gets nothing that is farther off.
    """
    # Folded weights, of this scheme alone, cannot be restored; and its block scales decide nothing.
    source: Any = w if w.scheme == "nvfp4" else restored_views(w)
    return to_text(problem_of(source, w.metadata(), w.device, BACKENDS[w.backend].accuracy), "auto")


@torch.no_grad()
def restore(w: PreparedFields) -> RawWeights:
    """The raw weights that `prepare` took (this rank's share of them), bit for bit, in memory of their own.

    So they stay what they are where `update_` writes into `w`.
    """
    tensors, plain = _parts(w)
    own = own_memory(tensors, w.tensors())
    return RawWeights(scheme=w.scheme, num_shared_experts=w.num_shared_experts, **own, **plain)  # type: ignore[arg-type]


def restored_views(w: PreparedFields) -> RawWeights:
    """`restore` without its copies: what the backend keeps as it came is memory of `w`. To be read, then dropped."""
    tensors, plain = _parts(w)
    return RawWeights(scheme=w.scheme, num_shared_experts=w.num_shared_experts, **tensors, **plain)  # type: ignore[arg-type]


def _parts(w: PreparedFields) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The fields of RawWeights besides the scheme: tensors, some of them memory of `w`, and plain values."""
    backend = BACKENDS[w.backend]
    arguments = {name: t for name, t in w.tensors().items() if name.split("_")[0] in ("w13", "w2")}
    for name in ("w13_bias", "w2_bias", "w13_scale_2", "w2_scale_2"):
        arguments.pop(name, None)
    tensors = backend.restore(SCHEMES[w.scheme], arguments, sizes_of(w))
    tensors |= {name: value for name in KEPT if (value := getattr(w, name)) is not None}
    plain = json.loads(urllib.parse.unquote(w.raw))
    for name, rows in (("w13_bias", w.intermediate_size), ("w2_bias", w.hidden_size)):
        dtype, bias = plain.pop(f"{name}_dtype"), getattr(w, name)
        if bias is not None:
            halves = 2 if name == "w13_bias" and ACTIVATIONS[w.activation].is_gated else 1
            if backend.bias_layout is not None:
                bias = backend.bias_layout.undo(name, bias, halves)
            kept = bias.unflatten(1, (halves, -1))[:, :, :rows].flatten(1)
            tensors[name] = kept.to(getattr(torch, dtype))
    return tensors, plain

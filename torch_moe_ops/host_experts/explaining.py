"""explain(HostExperts): which experts lie where, what crosses, and which backends run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from torch_moe_ops.prepared.explaining import explain as explain_weights


@dataclass(frozen=True)
class HostExpertsExplanation:
    """What `explain(layer)` says. `str()` is the text.

    on_device, on_host: ids of experts. lines: the text about the split; device_weights, host_weights: explanations of
    the backends of both parts, None of one without experts.
    """

    on_device: tuple[int, ...]
    on_host: tuple[int, ...]
    lines: tuple[str, ...]
    device_weights: Any
    host_weights: Any

    def __str__(self) -> str:
        parts = [*self.lines]
        for where, weights in (("on the device", self.device_weights), ("on the host", self.host_weights)):
            if weights is not None:
                parts += [f"{where}:", str(weights)]
        return "\n".join(parts)


def explain(layer: Any) -> HostExpertsExplanation:
    weights = [None if w is None else explain_weights(w) for w in (layer.on_device, layer.on_host)]
    return HostExpertsExplanation(layer.split.device, layer.split.host, tuple(_lines(layer)), *weights)


def _lines(layer: Any) -> list[str]:
    split, shared = layer.split, layer.num_shared_experts
    beside = f", {shared} of them shared" if shared else ""
    lines = [f"experts: {len(split.device)} on {layer.device}{beside}, {len(split.host)} on the host"]
    for where, ids, w in (("device", split.device, layer.on_device), ("host", split.host, layer.on_host)):
        if w is not None:
            mib = sum(t.nbytes for t in w.tensors().values()) / 2**20
            lines.append(f"    {where}: experts {_ranges(ids)}, backend {w.backend}, {mib:.1f} MiB")
    if not split.host:
        return [*lines, "crossing: nothing"]
    lines.append(f"crossing: {_crossing(layer)}")
    return [*lines, "results: float32 of both, added on the device, rounded once"]


def _crossing(layer: Any) -> str:
    if layer.staging is None or layer.staging.stream is None:
        return "none: both parts run on the CPU, one after the other"
    row = layer.hidden_size
    most, mib = layer.staging.max_tokens, layer.staging.nbytes / 2**20
    return (
        f"{torch.bfloat16.itemsize * row} bytes of bfloat16 hidden states a token and 8 for each of its experts to the "
        f"host, {4 * row} back, on a stream beside the device's experts; a host function runs the CPU's kernels. "
        f"{most} tokens at once, {mib:.1f} MiB of pinned memory for all layers of this size"
    )


def _ranges(ids: Sequence[int]) -> str:
    """ "0-3, 7": runs of neighbours."""
    runs = [[e for _, e in run] for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

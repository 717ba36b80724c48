"""Find the experts among the tensor names of a checkpoint.

Two layouts exist, under any prefix and with any module between the layer and its experts:

    ...layers.<n>.<module>.experts.<e>.<projection>.<part>     one module per expert
    ...layers.<n>.<module>.experts.<projection>[_.]<part>      all experts of a layer in one tensor
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_moe_ops.checkpoints.errors import CheckpointError

# DeepSeek-V4 keeps its prediction layers under mtp.<n>, beside layers.<n>.
_EXPERTS = re.compile(r"^(?P<root>(?:.*?\.)?(?:layers|mtp)\.(?P<layer>\d+)\.(?:.*?\.)?experts)\.(?P<rest>.+)$")
_PER_EXPERT = re.compile(r"^(\d+)\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)\.(.+)$")
_FUSED = re.compile(r"^(gate_up_proj|gate_proj|up_proj|down_proj)(?:[._](.+))?$")
_MTP_COMPONENT = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|nextn)\.")
# A prediction layer that is numbered like the others joins two streams through these modules.
_MTP_MODULE = re.compile(r"^(?P<layer>(?:.*?\.)?layers\.\d+)\.(?:eh_proj|enorm|hnorm)\.")

_PROJECTIONS = {
    "gate_up_proj": "gate_up",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_PART_ALIASES = {"scale": "weight_scale", "scale_inv": "weight_scale_inv"}
# Left over from calibration or for the cache of keys and values; they say nothing about the weights.
_SKIPPED = re.compile(r"(?:_amax|output_scale|k_scale|v_scale|e_score_correction_bias)$")


@dataclass
class ExpertLayer:
    """The expert tensors of one layer, by name only.

    Args:
        root: everything before ".<expert>" or ".<projection>", such as "model.layers.3.mlp.experts".
        number: n of layers.<n>.
        mtp: True for a multi-token-prediction layer.
        experts: expert number -> projection ("gate", "up", "down" or "gate_up") -> part ("weight",
            "weight_scale", ...) -> tensor name; the expert number is None where all experts share a tensor.
        unknown: names below `root` that fit neither layout.
    """

    root: str
    number: int
    mtp: bool = False
    experts: dict[int | None, dict[str, dict[str, str]]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_fused(self) -> bool:
        return None in self.experts

    def add(self, rest: str, name: str) -> None:
        """File one tensor under its expert, projection and part."""
        per_expert = _PER_EXPERT.match(rest)
        fused = None if per_expert else _FUSED.match(rest)
        if per_expert:
            expert, projection, part = int(per_expert[1]), per_expert[2], per_expert[3]
        elif fused:
            expert, projection, part = None, fused[1], fused[2] or "weight"
        else:
            if not _SKIPPED.search(rest):
                self.unknown.append(name)
            return
        if _SKIPPED.search(part):
            return
        parts = self.experts.setdefault(expert, {}).setdefault(_PROJECTIONS[projection], {})
        part = _PART_ALIASES.get(part, part)
        if part in parts:
            raise CheckpointError(f"tensors {parts[part]} and {name} are the same part ({part}) of one projection")
        parts[part] = name


def find_layers(names: Iterable[str], num_hidden_layers: int | None = None) -> list[ExpertLayer]:
    """Every layer with experts, ordered by number, prediction layers last.

    Args:
        names: all tensor names of the checkpoint.
        num_hidden_layers: from the model's config; layers from this number on predict further tokens.
    """
    layers: dict[str, ExpertLayer] = {}
    mtp_layers: set[str] = set()
    for name in names:
        match = _EXPERTS.match(name) if ".experts." in name else None
        if match:
            root = match["root"]
            if root not in layers:
                layers[root] = ExpertLayer(root, int(match["layer"]))
            layers[root].add(match["rest"], name)
        elif "norm." in name or "eh_proj." in name:
            module = _MTP_MODULE.match(name)
            if module:
                mtp_layers.add(module["layer"] + ".")
    for root, layer in layers.items():
        numbered = num_hidden_layers is not None and layer.number >= num_hidden_layers
        named = _MTP_COMPONENT.search(root) is not None
        layer.mtp = numbered or named or any(root.startswith(prefix) for prefix in mtp_layers)
    found = (layer for layer in layers.values() if layer.experts or layer.unknown)
    return sorted(found, key=lambda layer: (layer.mtp, layer.number, layer.root))


def select_layer(layers: list[ExpertLayer], number: int, mtp: bool, path: str) -> ExpertLayer:
    """The layer `number`; with `mtp` a prediction layer of that number comes before an ordinary one.

    Raises:
        CheckpointError: where there is none (the text lists those that have experts), or more than one.
    """
    ordinary = [layer for layer in layers if not layer.mtp and layer.number == number]
    predicting = [layer for layer in layers if layer.mtp and layer.number == number]
    chosen = (predicting if mtp else []) or ordinary
    if len(chosen) > 1:
        raise CheckpointError(f"{path}: layer {number} is ambiguous: {[layer.root for layer in chosen]}")
    if chosen:
        return chosen[0]
    text = f"{path}: layer {number} has no experts; layers with experts: {_numbers(layers, mtp=False)}"
    if _numbers(layers, mtp=True):
        text += f", multi-token-prediction layers (mtp=True): {_numbers(layers, mtp=True)}"
    raise CheckpointError(text)


def _numbers(layers: list[ExpertLayer], mtp: bool) -> list[int]:
    return [layer.number for layer in layers if layer.mtp == mtp]

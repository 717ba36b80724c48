"""Find the experts among the tensor names of a checkpoint.

Two layouts exist, under any prefix and with any module between the layer and its experts:

    ...layers.<n>.<module>.experts.<e>.<projection>.<part>     one module per expert
    ...layers.<n>.<module>.experts.<projection>[_.]<part>      all experts of a layer in one tensor

Granite calls the second one `block_sparse_moe.input_linear.<part>` and `block_sparse_moe.output_linear.<part>`, JetMoe
`mlp.input_linear.<part>`. DBRX has transformer.blocks.<n>.ffn.experts.mlp.<projection>_linear.<e>.<part> for the first
one, as ModelOpt splits it, and ...mlp.<projection> for unquantized rows of all experts below each other (stacked.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch_moe_ops.files.errors import CheckpointError

_PER_EXPERT = re.compile(r"([0-9]+)\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)\.(.+)")
_FUSED = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj|input_linear|output_linear)(?:[._](.+))?")
_DBRX = re.compile(r"mlp\.(w1|v1|w2)_linear\.([0-9]+)\.(.+)")
_STACKED = re.compile(r"mlp\.(w1|v1|w2)")
# Granite's and JetMoe's.
_AROUND_LINEARS = ("block_sparse_moe", "mlp")
# Of JetMoe, whose attention has experts too: each of them is a pair of projections without an activation.
_ATTENTION = "self_attention"
# DeepSeek-V4 keeps its prediction layers under mtp.<n>, beside layers.<n>.
_LAYERS = ("layers", "mtp")
_MTP_COMPONENTS = frozenset({"mtp", "mtp_layers", "nextn"})
# A prediction layer that is numbered like the others joins two streams through these modules.
_MTP_MODULES = frozenset({"eh_proj", "enorm", "hnorm"})

_PROJECTIONS = {
    "gate_up_proj": "gate_up",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "v1": "up",
    "w2": "down",
    "input_linear": "gate_up",
    "output_linear": "down",
}
PART_ALIASES = {"scale": "weight_scale", "scale_inv": "weight_scale_inv"}
# Left over from calibration or for the cache of keys and values; they say nothing about the weights.
SKIPPED = ("_amax", "output_scale", "k_scale", "v_scale", "e_score_correction_bias")


class NameConflict(ValueError):
    """Two tensors that are one part of one projection."""


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
        is_stacked: tensors that all experts share have two dimensions, and only the config says where an expert ends.
    """

    root: str
    number: int
    mtp: bool = False
    experts: dict[int | None, dict[str, dict[str, str]]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    is_stacked: bool = False

    @property
    def is_fused(self) -> bool:
        return None in self.experts

    def tensor_names(self) -> Iterator[str]:
        """Every tensor that belongs to an expert."""
        for projections in self.experts.values():
            for parts in projections.values():
                yield from parts.values()

    def add(self, rest: str, name: str) -> None:
        """File one tensor under its expert, projection and part."""
        per_expert, dbrx, stacked = (kind.fullmatch(rest) for kind in (_PER_EXPERT, _DBRX, _STACKED))
        fused = None if per_expert else _FUSED.fullmatch(rest)
        if per_expert:
            expert, projection, part = int(per_expert[1]), per_expert[2], per_expert[3]
        elif dbrx:
            expert, projection, part = int(dbrx[2]), dbrx[1], dbrx[3]
        elif stacked:
            expert, projection, part = None, stacked[1], "weight"
            self.is_stacked = True
        elif fused:
            expert, projection, part = None, fused[1], fused[2] or "weight"
        else:
            if not rest.endswith(SKIPPED):
                self.unknown.append(name)
            return
        if part.endswith(SKIPPED):
            return
        parts = self.experts.setdefault(expert, {}).setdefault(_PROJECTIONS[projection], {})
        part = PART_ALIASES.get(part, part)
        if part in parts:
            raise NameConflict(f"tensors {parts[part]} and {name} are the same part ({part}) of one projection")
        parts[part] = name


def find_layers(names: Iterable[str], num_hidden_layers: int | None = None) -> list[ExpertLayer]:
    """Every layer with experts, ordered by number, prediction layers last.

    Args:
        names: all tensor names of the checkpoint.
        num_hidden_layers: from the model's config; layers from this number on predict further tokens.
    """
    layers: dict[str, ExpertLayer] = {}
    modules: dict[str, str] = {}  # root of a layer's experts -> the layer itself
    mtp_modules: set[str] = set()
    for name in names:
        pieces = name.split(".")
        start = _layer_start(pieces)
        if start is None:
            continue
        module = ".".join(pieces[: start + 2])
        if pieces[start + 2] == _ATTENTION:
            continue
        if "experts" in pieces[start + 2 : -1] or _is_granite(pieces):
            end = pieces.index(pieces[-3] if _is_granite(pieces) else "experts", start + 2)
            root = ".".join(pieces[: end + 1])
            if root not in layers:
                layers[root] = ExpertLayer(root, int(pieces[start + 1]))
                modules[root] = module
            layers[root].add(".".join(pieces[end + 1 :]), name)
        elif pieces[start + 2] in _MTP_MODULES:
            mtp_modules.add(module)
    for root, layer in layers.items():
        numbered = num_hidden_layers is not None and layer.number >= num_hidden_layers
        named = not _MTP_COMPONENTS.isdisjoint(root.split("."))
        layer.mtp = numbered or named or modules[root] in mtp_modules
    found = (layer for layer in layers.values() if layer.experts or layer.unknown)
    return sorted(found, key=lambda layer: (layer.mtp, layer.number, layer.root))


def _is_granite(pieces: list[str]) -> bool:
    return len(pieces) > 2 and pieces[-3] in _AROUND_LINEARS and pieces[-2] in ("input_linear", "output_linear")


def _is_dbrx(pieces: list[str], i: int) -> bool:
    """Elsewhere blocks are parts of vision towers."""
    return i > 0 and pieces[i - 1] == "transformer" and pieces[i] == "blocks" and pieces[i + 2] == "ffn"


def _layer_start(pieces: list[str]) -> int | None:
    """Where `layers.<n>.`, or what stands for it, begins that something follows."""
    for i, piece in enumerate(pieces[:-2]):
        if (piece in _LAYERS or _is_dbrx(pieces, i)) and pieces[i + 1].isascii() and pieces[i + 1].isdigit():
            return i
    return None


def select_layer(layers: list[ExpertLayer], number: int, mtp: bool, path: str) -> ExpertLayer:
    """The layer `number`; with `mtp` a prediction layer of that number comes before an ordinary one.

    Raises:
        CheckpointError: where there is none (the text lists those that have experts), or more than one.
    """
    ordinary = [layer for layer in layers if not layer.mtp and layer.number == number]
    predicting = [layer for layer in layers if layer.mtp and layer.number == number]
    chosen = (predicting if mtp else []) or ordinary
    if len(chosen) > 1:
        raise CheckpointError(f"{path}: layer {number} is ambiguous: {[layer.root for layer in chosen[:4]]}")
    if chosen:
        return chosen[0]
    text = f"{path}: layer {number} has no experts; layers with experts: {_numbers(layers, mtp=False)}"
    if any(layer.mtp for layer in layers):
        text += f", multi-token-prediction layers (mtp=True): {_numbers(layers, mtp=True)}"
    raise CheckpointError(text)


def _numbers(layers: list[ExpertLayer], mtp: bool) -> str:
    """Such as "[1, 2, 3]"; of more than a hundred layers the first."""
    numbers = [layer.number for layer in layers if layer.mtp == mtp]
    return f"{numbers[:100]}{f' and {len(numbers) - 100} more' if len(numbers) > 100 else ''}"

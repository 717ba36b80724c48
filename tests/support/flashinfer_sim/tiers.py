"""What the compiled routing kernels refuse, read from the sources that the flashinfer wheel ships.

Kernels are compiled for tiers of (experts, top_k), by what they do before and after the choice. Newer releases throw
where no tier covers a call; older ones warn and leave the choice uninitialized. Both are assertions here.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from . import cpp

POLICIES = "data/include/flashinfer/trtllm/fused_moe/RoutingCustomPolicy.cuh"
SOURCES = "data/csrc/fused_moe/trtllm_backend"

# What stands before and after the choice. Sigmoid is SigmoidRenorm told not to renormalize.
_POLICY_OF = {
    "Default": ("SoftmaxPreprocess", "NoOpPostprocess"),
    "Renormalize": ("NoOpPreprocess", "SoftmaxPostprocess"),
    "RenormalizeNaive": ("NoOpPreprocess", "SoftmaxPostprocess"),
    "TopK": ("NoOpPreprocess", "NoOpPostprocess"),
    "TopKSigmoid": ("NoOpPreprocess", "SigmoidPostprocess"),
    "Sigmoid": ("SigmoidPreprocess", "SumNormalizePostprocess"),
    "SigmoidRenorm": ("SigmoidPreprocess", "SumNormalizePostprocess"),
    "DeepSeekV3": ("SigmoidBiasPreprocess", "ScaledSumNormalizePostprocess"),
    "MiniMax2": ("SigmoidBiasPreprocess", "ScaledSumNormalizePostprocess"),
}
_DEREFERENCE_BIAS = ("DeepSeekV3", "MiniMax2")


@cache
def _tiers() -> dict[tuple[str, str], tuple[tuple[int, int], ...]]:
    """{policies: (most experts, most top_k) of each tier}."""
    text = re.sub(r"//[^\n]*", "", cpp.source(POLICIES))
    found = re.findall(r"struct PolicyTraits<(\w+), (\w+)> \{\s*using Pairs = TierList<(.*?)>\s*;", text, re.S)
    tiers = {
        (before, after): tuple((int(e), int(k)) for e, k in re.findall(r"Tier<(\d+), (\d+)>", pairs))
        for before, after, pairs in found
    }
    assert all(tiers.values()) and _POLICY_OF["Renormalize"] in tiers, f"{POLICIES} looks different"
    return tiers


def covered(method: str, experts: int, top_k: int) -> bool:
    """Whether a tier of a method, other than DeepSeekV3 with groups, covers a call."""
    return any(experts <= e and top_k <= k for e, k in _tiers().get(_POLICY_OF[method], ()))


@cache
def needs_multiples_of_four() -> bool:
    """Of experts, wherever logits are routed; in older releases."""
    import flashinfer

    files = sorted((Path(flashinfer.__file__).parent / SOURCES).glob("*routing_custom*.cu*"))
    assert files, SOURCES
    return any("mNumExperts % 4" in file.read_text() for file in files)


def check_logits(method: str, a: dict[str, Any]) -> None:
    """Before logits are routed. a: arguments of a function of the module."""
    experts, top_k, groups = a["num_experts"], a["top_k"], a["n_group"] or 0
    if method == "DeepSeekV3" and groups > 1:
        kept = a["topk_group"] or 0
        assert groups <= 8 and experts % groups == 0 and experts // groups <= 32
        assert kept <= 4 and kept <= groups and top_k < kept * experts // groups
        assert experts % 4 == 0 and experts <= 512 and top_k <= 22
        return
    assert experts % 4 == 0 or not needs_multiples_of_four()
    assert covered(method, experts, top_k), f"no tier of {method} covers {experts} experts and top_k {top_k}"
    assert method not in _DEREFERENCE_BIAS or a["routing_bias"] is not None, f"{method} reads its bias without a check"


def check_given(a: dict[str, Any]) -> None:
    """Before tokens are sorted by ids that were given."""
    assert covered("Renormalize", a["num_experts"], a["top_k"])

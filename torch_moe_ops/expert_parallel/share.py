"""One rank's share of a layer, prepared: the experts of its slots, and a part of each under tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch_moe_ops.config.parallel import FusedMoEParallelConfig
from torch_moe_ops.expert_parallel.groups import Ranks
from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.sharding import shard


def prepared_share(
    raw: RawWeights, placement: ExpertPlacement, ranks: Ranks, prepare_options: dict[str, Any]
) -> PreparedWeights:
    """What the rank runs of `raw`, which holds all experts whole; experts are numbered by slots."""
    if placement.world_size != ranks.size:
        raise ValueError(f"ExpertParallel: placement must have {ranks.size} ranks, got {placement.world_size}")
    share = placement.share(raw, ranks.rank)
    if ranks.tp_size > 1:
        share, _, _ = shard(share, FusedMoEParallelConfig.make(ranks.tp_size, 1, 1, 1, tp_rank=ranks.tp_rank))
    offset = placement.offset(ranks.rank)
    return prepare(share, num_experts=placement.num_slots, local_expert_offset=offset, **prepare_options)

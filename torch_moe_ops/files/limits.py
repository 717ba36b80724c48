"""What the loader takes at most. Far above any published checkpoint; beyond, CheckpointError names the limit.

Time and memory are linear in the size of the files within them: docs/design.md, section 5.
"""

from __future__ import annotations

# The format's reference implementation refuses larger headers as well.
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 100_000_000  # model.safetensors.index.json
MAX_CONFIG_BYTES = 16_000_000  # config.json, hf_quant_config.json
MAX_JSON_DEPTH = 64  # arrays and objects within one another
MAX_JSON_CONTAINERS = 4_000_000  # arrays and objects of one text: Python keeps each in 60 to 90 bytes
MAX_NUMBER_DIGITS = 308  # of an integer: each fits a float64
MAX_TENSORS = 1_000_000  # of one file
MAX_SHARDS = 10_000
MAX_NAME_LENGTH = 512  # of a tensor or shard
MAX_DIMENSIONS = 64
MAX_EXPERTS = 8192  # of one layer

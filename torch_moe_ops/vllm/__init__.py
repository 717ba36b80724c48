"""Quantized experts inside vLLM: a plug-in that vLLM finds by itself, in the entry point group `vllm.general_plugins`.

vLLM calls `register` in each of its processes. It takes over the experts of checkpoints that the ops run, and leaves
everything else with vLLM, in one log line that says why (docs/howto/vllm.md). MOEQ_VLLM=0 turns it off.

Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

from torch_moe_ops.vllm.registration import register

__all__ = ["register"]

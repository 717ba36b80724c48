"""The experts of a layer that lie on the host: jobs of the CPU kernels, run by a host function in a stream."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from torch_moe_ops.backends import cpu
from torch_moe_ops.core.activations import check_activation
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.host_experts.staging import Rows, Staging
from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.updating import follow

_Shape = tuple[int, int, torch.dtype]  # rows, top_k, dtype of the hidden states


class HostShare:
    """Runs w, prepared for the backend `cpu`, on rows that are copied through `staging`.

    A job says once where a call of so many rows finds its arguments, so that a graph has nothing but its number.
    """

    def __init__(self, w: PreparedWeights, staging: Staging) -> None:
        self.w, self.staging = w, staging
        self._jobs: dict[_Shape, int] = {}
        follow(w, self)
        weakref.finalize(self, _drop, self._jobs, staging)

    def start(self, hidden_states: Tensor, places: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """Enqueue on the current stream, or on the CPU do, what brings the results to `out`.

        Args:
            hidden_states, places, topk_weights: of the op, contiguous, at least one row.
            out: float32 [num_tokens, hidden_size] on the same device.
        """
        most, top_k = self.staging.max_tokens, places.shape[1]
        for begin in range(0, out.shape[0], most):
            part = slice(begin, min(begin + most, out.shape[0]))
            given = (hidden_states[part], places[part], topk_weights[part])
            with self.staging.lock:
                self._step(given, (part.stop - begin, top_k, hidden_states.dtype), out[part])

    def _step(self, given: tuple[Tensor, Tensor, Tensor], shape: _Shape, out: Tensor) -> None:
        """At most as many rows as cross at once."""
        rows, job = self.staging.rows(*shape), self._job(shape)
        for there, here in zip(rows, given, strict=False):
            there.copy_(here, non_blocking=True)
        if out.is_cuda:
            torch.ops.moeq_C.enqueue_host_job(job, torch.cuda.current_stream(out.device).cuda_stream)
        else:
            torch.ops.moeq_C.run_host_job(job)
        out.copy_(rows.out, non_blocking=True)

    def renew(self) -> None:
        """Bind every job again under its number, after the values of w changed: some arguments are made of others."""
        for shape, job in self._jobs.items():
            torch.ops.moeq_C.replace_host_job(job, _new_job(self.w, self.staging.rows(*shape)))

    def _job(self, shape: _Shape) -> int:
        job = self._jobs.get(shape)
        if job is None:
            _check_once(self.w, shape)
            job = self._jobs[shape] = _new_job(self.w, self.staging.rows(*shape))
        return job


def _drop(jobs: dict[_Shape, int], staging: Staging) -> None:
    """After what is enqueued: a job that is not there when its turn comes leaves results that nobody computed."""
    staging.unused.extend(jobs.values())
    while staging.unused and staging.is_done():
        torch.ops.moeq_C.drop_host_job(staging.unused.pop())


def _check_once(w: PreparedWeights, shape: _Shape) -> None:
    """What the routed op refuses, such as another dtype than that of unquantized weights, is refused by it."""
    _, top_k, dtype = shape
    with torch.device("cpu"):  # whatever the default is
        ids, weights = torch.full((1, top_k), -1, dtype=torch.int32), torch.zeros(1, top_k)
        hidden_states = torch.zeros(1, w.hidden_size, dtype=dtype)
    fused_moe_routed(hidden_states, ids, weights, w, out_dtype=torch.float32)


def _new_job(w: PreparedWeights, rows: Rows) -> int:
    alpha, beta, limit = check_activation("host_experts", w.activation, w.swiglu_alpha, w.swiglu_beta, w.swiglu_limit)
    absent = dict.fromkeys(ExpertsCall._fields)
    given = {
        "scheme": w.scheme,
        "hidden_states": rows.hidden_states,
        "topk_ids": rows.places,
        "topk_weights": rows.topk_weights,
        "backend": w.backend,
        "act_format": w.act_format,
        "activation": w.activation,
        "swiglu_alpha": alpha,
        "swiglu_beta": beta,
        "swiglu_limit": limit,
        "num_experts": w.num_experts,
        "local_expert_offset": w.local_expert_offset,
        "router_weight_on_input": w.router_weight_on_input,
        "weight_policy": w.weight_policy,
        "out_dtype": torch.float32,
    }
    return cpu.host_job(ExpertsCall(**{**absent, **w.named_op_weights(), **given}), rows.out)  # type: ignore[arg-type]

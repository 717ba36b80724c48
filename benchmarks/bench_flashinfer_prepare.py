"""Preparing a DeepSeek-V3 layer for FlashInfer's TRTLLM kernels on a CPU: seconds, and memory beside the result.

    python benchmarks/bench_flashinfer_prepare.py [--experts 256] [--scheme nvfp4] [--backend flashinfer_trtllm]
        [--restore] [--out benchmarks/results/flashinfer_prepare_cpu.jsonl]

Hidden size 7168, intermediate size 2048. Weights are bytes of a pattern; no rule of the layouts looks at values.
copy_s is a plain copy of the same tensors into fresh memory, the least that any preparation takes.
Memory is the high-water mark of the process during `prepare`, less what it held before and less the result.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import threading
import time
from pathlib import Path

import torch

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES

HIDDEN, INTER = 7168, 2048
_PAGE = resource.getpagesize()


def raw_layer(scheme_name: str, experts: int) -> moe.RawWeights:
    """Experts of the model's sizes."""
    scheme, fields = SCHEMES[scheme_name], {}
    for name, n, k, halves in (("w13", 2 * INTER, HIDDEN, 2), ("w2", HIDDEN, INTER, 1)):
        dtype = scheme.weight_dtypes[0]
        pattern = torch.arange(experts * n * scheme.storage_k(k) * dtype.itemsize // 8).view(torch.uint8)
        fields[name] = pattern.view(dtype).view(experts, n, scheme.storage_k(k))
        if scheme.scales is not None:
            shape, kind = scheme.scales.shapes(n, k, halves)[0], scheme.scales.dtypes[0]
            fields[f"{name}_scale"] = torch.ones((experts, *shape)).to(kind)
    if scheme.has_scale_2:
        fields |= {"w13_scale_2": torch.ones(experts, 2), "w2_scale_2": torch.ones(experts)}
    return moe.RawWeights(scheme=scheme_name, **fields)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Watch:
    """The largest number of resident bytes while it is entered, sampled every 2 ms."""

    def __enter__(self) -> Watch:
        self.start = self.peak = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def measure(scheme: str, experts: int, backend_name: str, restoring: bool) -> dict[str, object]:
    raw, backend = raw_layer(scheme, experts), BACKENDS[backend_name]
    began = time.perf_counter()
    copies = {name: t.clone() for name, t in raw.tensors().items()}
    copy_seconds = time.perf_counter() - began
    copies.clear()
    with Watch() as watch:
        began = time.perf_counter()
        tensors = backend.prepare(raw)
        seconds = time.perf_counter() - began
    result = size_of(tensors)
    expert = result / experts
    row: dict[str, object] = {
        "scheme": scheme,
        "backend": backend_name,
        "experts": experts,
        "prepare_s": round(seconds, 2),
        "copy_s": round(copy_seconds, 2),
        "result_gib": round(result / 2**30, 2),
        "extra_experts": round((watch.peak - watch.start - result) / expert, 2),
    }
    if restoring:
        kept = {name: raw.tensors()[name][:2] for name in tensors}
        few = {name: t[:2] for name, t in tensors.items()}
        back = backend.restore(SCHEMES[scheme], few, Sizes(2, HIDDEN, INTER, True, raw.w13.dtype))
        row["restores_2_experts"] = all(
            torch.equal(back[n].view(torch.uint8), kept[n].view(torch.uint8)) for n in tensors
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--backend", default="flashinfer_trtllm")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    row = measure(options.scheme, options.experts, options.backend, options.restore)
    row |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    print(json.dumps(row))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

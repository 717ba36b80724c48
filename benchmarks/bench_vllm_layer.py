#!/usr/bin/env python3
"""Time vLLM's own MoE layer, from router logits to its result, with vLLM's methods and with the plug-in's.

    python benchmarks/bench_vllm_layer.py --shapes qwen3_30b,dsv3 --out FILE   # where vLLM 0.26 to 0.33 is installed

The layer is what vLLM's models build (`FusedMoE`: router, experts, runner) of an NVFP4 checkpoint in ModelOpt's format,
with the same random weights; only the method of its experts differs: vLLM's `marlin` and `humming`, and ours, `moeq`,
as the registered plug-in gives it. Medians of CUDA graph replays over rotating routings, the layers taking turns
(peers/README.md has the protocol); before that results are compared. `scripts/carry_vllm.sh` packs what it needs of
vLLM for a machine without a network. Marlin has its kernels as PTX, which the driver compiles at their first call.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))  # read when CUDA starts: room for what the driver compiles
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

import result_lines  # noqa: E402
import torch  # noqa: E402
from moe_peers import common, runner  # noqa: E402

OURS = "moeq"
CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
CLOSE = 2e-2  # relative L2 distance between two methods: each rounds the intermediate result in its own way


def quantization(way: str) -> Any:
    """vLLM's config of such a checkpoint, or ours, which vLLM finds under the same name once the plug-in is there."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    kind = get_quantization_config("modelopt_fp4") if way == OURS else ModelOptNvFp4Config
    config = kind.from_config({**CONFIG, "exclude_modules": []})
    config.packed_modules_mapping = {}
    return config


def fill(experts: Any, weights: common.Weights) -> None:
    """Give vLLM's RoutedExperts a checkpoint's tensors."""
    for which, name in ((1, "w13"), (2, "w2")):
        codes, scale, factor = weights.matrix(which)
        for suffix, tensor in (("weight", codes), ("weight_scale", scale)):
            getattr(experts, f"{name}_{suffix}").data.copy_(tensor)
        second = getattr(experts, f"{name}_weight_scale_2").data
        second.copy_(factor[:, None].expand_as(second) if second.dim() == 2 else factor)
        getattr(experts, f"{name}_input_scale").data.fill_(1e-3)


def build(way: str, weights: common.Weights, number: int) -> tuple[Any, Any]:
    """(the layer, the config it runs under); number: of the layer in its model, which vLLM wants unique."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoE

    shape, config = weights.shape, VllmConfig()
    config.kernel_config.moe_backend = "auto" if way == OURS else way
    with set_current_vllm_config(config), torch.device(common.DEV):
        layer = FusedMoE(
            num_experts=shape.E,
            top_k=shape.k,
            hidden_size=shape.H,
            intermediate_size=shape.I,
            params_dtype=torch.bfloat16,
            renormalize=True,
            quant_config=quantization(way),
            tp_size=1,
            dp_size=1,
            pcp_size=1,
            prefix=f"model.layers.{number}.mlp.experts",
        )
        experts = layer.routed_experts
        fill(experts, weights)
        experts.quant_method.process_weights_after_loading(experts)
    return layer, config


class VllmLayer(runner.UnderTest):
    """vLLM's layer from router logits."""

    def __init__(self, way: str, weights: common.Weights, number: int) -> None:
        from vllm.forward_context import set_forward_context

        layer, config = build(way, weights, number)

        def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            with set_forward_context(None, config):
                return layer(x, logits)

        super().__init__(f"vllm-{way}", "nvfp4", forward, True)
        method = layer.routed_experts.quant_method
        self.runs = type(method).__name__
        if way == OURS:
            self.runs += " on " + layer.routed_experts.moeq_weights.backend

    def details(self, M: int) -> dict[str, Any]:
        return {"method": self.runs}


def layers_of(shape: common.Shape, ways: list[str], sink: common.Sink) -> Iterator[VllmLayer]:
    torch.manual_seed(0)
    weights = common.Weights.random("nvfp4", shape)
    for number, way in enumerate(ways):
        try:
            yield VllmLayer(way, weights, number)
        except Exception as error:  # the others go on
            if way == OURS:
                raise
            sink.emit(event="error", layer=way, shape=shape.name, err=repr(error)[:600])


def compare(layers: list[VllmLayer], shape: common.Shape, ms: list[int], sink: common.Sink) -> None:
    """Every layer's result beside the first one's."""
    for m in ms:
        inputs = common.make_inputs(shape, m, 5)
        results = {layer.label: layer(*layer.prepare(inputs)) for layer in layers}
        first = results[layers[0].label]
        for name, result in results.items():
            error = common.relative_error(result, first)
            sink.emit(event="check", layer=name, shape=shape.name, M=m, rel_err=error, limit=CLOSE, ok=error < CLOSE)


def start() -> None:
    """The plug-in as vLLM's processes load it, and groups of one process, which layers ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    from torch_moe_ops.vllm import register

    register()
    with set_current_vllm_config(VllmConfig()):
        backend = "nccl" if common.DEV == "cuda" else "gloo"
        method = f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}"
        init_distributed_environment(1, 0, method, 0, backend)
        initialize_model_parallel(1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="moeq,marlin,humming")
    parser.add_argument("--shapes", default="qwen3_30b")
    parser.add_argument("--ms", default="1,8,64,256,1024")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0, help="seconds after which nothing new is begun; 0: none")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    import vllm

    begin, sink = time.monotonic(), common.Sink(args.out)
    sink.emit(**result_lines.environment(), date=datetime.date.today().isoformat(), vllm=vllm.__version__)
    start()
    context = runner.Context(Path("."))
    with torch.inference_mode():
        for shape in common.parse_shapes(args.shapes):
            layers = list(layers_of(shape, args.ways.split(","), sink))
            ms = [int(m) for m in args.ms.split(",")]
            compare(layers, shape, [m for m in ms if m <= 64], sink)
            for m in ms:
                if not args.budget or time.monotonic() - begin < args.budget:
                    runner.time_one(shape, "uniform", common.uniform, m, layers, context, sink, args.reps, 0)
            layers.clear()
            runner.free()
    return runner.finish(sink)


if __name__ == "__main__":
    raise SystemExit(main())

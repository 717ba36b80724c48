"""FlashInfer's CUTLASS MoE for Hopper with MXFP4 weights: one call of `cutlass_fused_moe` a layer.

mxfp4 keeps bfloat16 activations (W4A16). mxfp4-a8 quantises them to e4m3 by token inside the call, and folds the
weights' scales into e4m3 codes before the products (FlashInfer's "Humming-style" path).

The package must be importable and its SM90 module built ahead: scripts/flashinfer_build_sm90.sh --mxfp4.
"""
import itertools
import os
import statistics

import torch

from . import common, steps
from .timing import Layer

FORMATS = ("mxfp4", "mxfp4-a8")
DEFAULT = "mxfp4"
MODULE = "fused_moe_90"
MULTIPLE = 128  # of the hidden and the intermediate size
COMPENSATION = 64.0  # 2^6 between FlashInfer's residual scales and what its W4A8 kernels take
EXPERTS_AT_ONCE = 8  # preparing W4A8 needs some 20 bytes a weight
TUNING_ROUNDS = 5
AGREEMENT = 1e-2  # between two tiles: the sums have another order, and codes of the intermediate may follow
ABSENT = "absent"
ROWS_TOKENS = [*itertools.product((64, 128), (16, 32, 64, 128))]
TILES = [(*mn, k) for mn in ROWS_TOKENS for k in (128, 256, 512)]
TILES += [(128, 256, 128), (128, 256, 256), (256, 128, 128), (256, 128, 256), (256, 256, 128)]
CLUSTERS = ("", " 2x1", " 1x2", " 2x2")
ONE_WARPGROUP = [f"128x{n}x128 {kind}" for n in (8, 16, 32, 40, 64) for kind in ("prefill", "rolling")]
TACTICS = ["x".join(map(str, tile)) + cluster for tile in TILES for cluster in CLUSTERS] + ONE_WARPGROUP


def package():
    """flashinfer.fused_moe, with the module at hand: what is missing is an error, not hours of compilation"""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(steps.scratch()))  # read at the import; it writes there
    from flashinfer import fused_moe
    from flashinfer.jit import env
    ahead = env.get_aot_artifacts(MODULE)
    if not ahead and not (env.FLASHINFER_JIT_DIR / MODULE / f"{MODULE}.so").exists():
        raise RuntimeError(f"{MODULE}.so is not there: run scripts/flashinfer_build_sm90.sh --mxfp4")
    return fused_moe


def up_first(w13):
    """(E, gate rows then up rows, ...) -> up rows first, as FlashInfer's SwiGLU wants them"""
    gate, up = w13.chunk(2, 1)
    return torch.cat((up, gate), 1)


def operands_16(theirs, codes, scale):
    weight = theirs.interleave_moe_weights_for_sm90_mixed_gemm(codes.contiguous(), "fp4")
    return weight, theirs.interleave_moe_scales_for_sm90_mixed_gemm(scale).view(torch.int32), None


def operands_8(theirs, codes, scale):
    """the residual scale is one of each expert, so that experts can be prepared by the piece"""
    parts = zip(codes.split(EXPERTS_AT_ONCE), scale.split(EXPERTS_AT_ONCE))
    made = [theirs.preprocess_moe_weights_for_sm90_mixed_gemm_humming(c.contiguous(), s.contiguous()) for c, s in parts]
    weight, folded, residual = (torch.cat(p) for p in zip(*made))
    return weight, folded.view(torch.int32), residual * COMPENSATION


class FlashInfer(Layer):
    label = "flashinfer_cutlass_sm90"

    def __init__(self, fmt, weights):
        self.theirs = package()
        self.fmt, self.shape = fmt, weights.shape
        self.eight = common.act_bits(fmt) == 8
        make = operands_8 if self.eight else operands_16
        self.w13, s13, r13 = make(self.theirs, up_first(weights.w13), up_first(weights.w13_scale))
        self.w2, s2, r2 = make(self.theirs, weights.w2, weights.w2_scale)
        reserved = torch.ones((), device=common.DEV)
        self.scales = [s13, r13, reserved, s2, r2] if self.eight else [s13, s2]
        self.workspaces, self.tuned, self.present = {}, {}, None

    @property
    def kind(self):
        return {"use_w4_group_scaling": True, "use_wfp4afp8_humming": self.eight}

    def workspace(self, M):
        """one for each M, and kept: captured graphs hold its address"""
        if M not in self.workspaces:
            s = self.shape
            size = self.theirs.cutlass_fused_moe_workspace_size(
                M, s.H, s.I, s.E, s.k, x_dtype=torch.bfloat16, weight_dtype=torch.uint8, **self.kind)
            self.workspaces[M] = torch.empty(size, dtype=torch.uint8, device=common.DEV)
        return self.workspaces[M]

    def run(self, x, ids, weights, tactics):
        y = self.theirs.cutlass_fused_moe(
            x, ids, weights, self.w13, self.w2, torch.bfloat16, quant_scales=self.scales, profile_ids=list(tactics),
            workspace_buffer=self.workspace(x.shape[0]), **self.kind)
        return y[0] if isinstance(y, (list, tuple)) else y

    def prepare(self, inputs):
        args = steps.pad_last(inputs.x, self.shape.H), inputs.ids, inputs.weights
        M = inputs.x.shape[0]
        if M not in self.tuned:
            self.tuned[M] = self.tune(M)
        return args

    def __call__(self, x, ids, weights):
        return self.run(x, ids, weights, self.tuned[x.shape[0]][0])

    def details(self, M):
        best, out = self.tuned[M]
        names = [[self.name(stage, t) for t in tactics] for stage, tactics in enumerate(self.present)]
        return {"tactics": [self.name(stage, t) for stage, t in enumerate(best)], "tactics_present": names,
                "tactics_out": out, "padded": [self.shape.H, self.shape.I]}

    # ------------------------------------------------------------ the tactics: tiles of the first and the second GEMM

    def name(self, stage, tactic):
        """rows of weights x tokens x K of the tile, and the cluster or the main loop"""
        number = tactic - self.firsts[stage]
        return TACTICS[number] if number < len(TACTICS) else str(number)

    def listed(self):
        """the tactics of each GEMM that FlashInfer finds fit for this shape; the module may lack their kernels"""
        from flashinfer.fused_moe.core import get_cutlass_fused_moe_module
        from flashinfer.tllm_enums import ActivationType
        runner = get_cutlass_fused_moe_module("90").MoERunner(
            x_dtype=torch.bfloat16, weight_dtype=torch.uint8, output_dtype=torch.bfloat16, top_k=self.shape.k,
            tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, cluster_size=1, cluster_rank=0, enable_alltoall=False,
            use_deepseek_fp8_block_scale=False, use_mxfp8_act_scaling=False, min_latency_mode=False, enable_pdl=True,
            activation_type=ActivationType.Swiglu, use_packed_weights=False, use_fused_finalize=True, **self.kind)
        inner, s = runner.fused_moe_runner, self.shape
        self.firsts = 0, int(inner.get_gemm1_tactic_count())
        return [[int(t) for t in inner.get_valid_tactics_for_shape(stage, n, k)]
                for stage, n, k in ((1, s.n1, s.H), (2, s.H, s.I))]

    def verdict(self, args, pair, want):
        """None where these tactics compute what `want` is, else why they are out"""
        try:
            got = self.run(*args, pair)
        except Exception as error:  # noqa: BLE001  FlashInfer's tuner skips whatever throws, too
            torch.cuda.synchronize()  # raises when the device failed
            return ABSENT if "not in this subset of the module" in str(error) else repr(error)[:200]
        error = common.relative_error(got, want)
        return None if error < AGREEMENT else f"differs from the default tile by {error:.3g}"

    def tune(self, M):
        """(the fastest tactics, why others are out), timed as layers are: several routings in one graph.

        FlashInfer's own tuner times one GEMM at a time, with the cost of its calls in the way of small batches.
        """
        count = max(2, common.rotation(M) // 2)
        inputs = [common.make_inputs(self.shape, M, 900 + i) for i in range(count)]
        args = [(i.x, i.ids, i.weights) for i in inputs]
        listed = self.present or self.listed()
        best, out, present = [tactics[0] for tactics in listed], {}, []
        want = self.run(*args[0], best)  # the tile that FlashInfer takes where nothing is tuned: it must be there
        for stage, tactics in enumerate(listed):
            timed = {}
            for tactic in tactics:
                pair = [tactic, best[1]] if stage == 0 else [best[0], tactic]
                why = self.verdict(args[0], pair, want)
                if why is None:
                    timed[tactic] = self.time(args, pair)
                elif why != ABSENT:
                    out[f"GEMM{stage + 1} {self.name(stage, tactic)}"] = why
            best[stage] = min(timed, key=timed.get)
            present.append([*timed])
        self.present = self.present or present
        return best, out

    def time(self, args, tactics):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for a in args:
                self.run(*a, tactics)
        graph.replay()
        times = []
        for _ in range(TUNING_ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def build(fmt, weights, context):
    if weights.shape.act != "silu":
        raise common.Unsupported("only silu(gate) * up is called here")
    if common.DEV == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        raise common.Unsupported("its mixed-input kernels are for compute capability 9.0")
    return [FlashInfer(fmt, steps.pad_weights(weights, MULTIPLE))]

"""vLLM 0.33's NVFP4 emulation, decoded inside a Triton GEMM (see vllm_triton.EmulationGemm)."""
from .vllm_triton import EmulationGemm

FORMATS = ("nvfp4",)
DEFAULT = "nvfp4"


def build(fmt, weights, context):
    return [EmulationGemm(context, fmt, weights)]

"""Wrong tensors for op calls: what `test_op_abuse` puts in the place of each argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)
Mutation = tuple[str, Callable[[Tensor], Tensor | None]]


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits where the width is the same, else a tensor of the same shape and any values."""
    if t.element_size() == torch.empty(0, dtype=dtype).element_size() and t.is_contiguous():
        return t.view(dtype)
    return torch.zeros(t.shape, dtype=torch.uint8, device=t.device).to(dtype)


def dtypes(t: Tensor) -> Iterator[Mutation]:
    """The shape stays. Every other dtype: narrower, of the same width, wider."""
    for dtype in DTYPES:
        if dtype != t.dtype:
            yield f"dtype {dtype}", lambda t, dtype=dtype: as_dtype(t, dtype)


def shapes(t: Tensor) -> Iterator[Mutation]:
    """The dtype stays."""
    yield "a dimension more", lambda t: t.unsqueeze(0)
    yield "flat", lambda t: t.flatten()[: max(0, t.numel() - 1)]
    yield "no dimension", lambda t: t.new_zeros(()) if t.ndim else t.new_zeros(3)
    for dim in range(t.ndim):
        if t.shape[dim]:
            yield f"dimension {dim} shorter", lambda t, dim=dim: t.narrow(dim, 0, t.shape[dim] - 1).contiguous()
            yield f"dimension {dim} empty", lambda t, dim=dim: t.narrow(dim, 0, 0)
        yield f"dimension {dim} longer", lambda t, dim=dim: _longer(t, dim)


def _longer(t: Tensor, dim: int) -> Tensor:
    shape = list(t.shape)
    shape[dim] += 1
    return t.new_zeros(shape)


def places(t: Tensor) -> Iterator[Mutation]:
    """Another device or layout, or none."""
    yield "on meta", lambda t: t.to("meta")
    if t.is_cuda:
        yield "on the CPU", lambda t: t.cpu()
    yield "None", lambda t: None
    if t.ndim and t.dtype not in (torch.float8_e4m3fn,):
        yield "sparse COO", lambda t: t.to_sparse()
    if t.ndim == 2 and t.dtype in (torch.float32, torch.bfloat16, torch.int32):
        yield "sparse CSR", lambda t: t.to_sparse_csr()
    if t.ndim and t.dtype == torch.float32:
        yield "MKL-DNN", lambda t: t.to_mkldnn() if t.device.type == "cpu" else t.to_sparse()
        yield "nested", lambda t: torch.nested.as_nested_tensor(list(t.unbind()), layout=torch.strided)
        if hasattr(torch, "quantize_per_tensor"):  # which torch will remove
            yield "quantized", lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)


def storages(t: Tensor) -> Iterator[Mutation]:
    """The same values lying otherwise."""
    yield "at an odd element", _shifted
    if t.ndim > 1:
        yield "transposed", lambda t: _bits(t).transpose(0, -1).contiguous().transpose(0, -1).view(t.dtype)
    if t.ndim:
        yield "every second element", lambda t: _bits(t).repeat_interleave(2, -1)[..., ::2].view(t.dtype)
        yield "one element everywhere", lambda t: t.flatten()[:1].expand(t.shape) if t.numel() else t


def _bits(t: Tensor) -> Tensor:
    """Indexing and copying lack float8 on some versions of torch."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def _shifted(t: Tensor) -> Tensor:
    """One element behind an aligned address."""
    room = t.new_empty(t.numel() + 1)
    moved = room[1:].view(t.shape)
    _bits(moved).copy_(_bits(t))
    return moved


def freed(t: Tensor) -> Iterator[Mutation]:
    """The storage no longer holds what the shape says, as after FSDP has resharded a parameter."""

    def resized(t: Tensor, share: int) -> Tensor:
        copy = t.clone()
        copy.untyped_storage().resize_(copy.untyped_storage().nbytes() // 2 * share)
        return copy

    if t.numel() > 1:
        yield "without memory", lambda t: resized(t, 0)
        yield "with half of its memory", lambda t: resized(t, 1)


def wrong(t: Tensor) -> list[Mutation]:
    """Everything that is a different tensor."""
    return [*dtypes(t), *shapes(t), *places(t)]

"""Green contexts of CUDA: streams whose kernels have a part of the multiprocessors, and parts that share none.

`torch.cuda.green_contexts` makes one part of the device at a time, so that two of them may be the same multiprocessors.
"""

from __future__ import annotations

import ctypes

import torch

SM = 1  # CU_DEV_RESOURCE_TYPE_SM
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
GROUP = 8  # multiprocessors of a part are a multiple of it, from compute capability 9.0 on


class Resource(ctypes.Structure):
    """CUdevResource, with room for what later versions append."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("multiprocessors", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


def call(name: str, *arguments: object) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    assert code == 0, f"{name}: CUDA error {code}"


class GreenContext:
    """A part of the device. It lives as long as the process."""

    def __init__(self, resource: Resource, device: int):
        description, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), ctypes.c_uint(1))
        call("cuGreenCtxCreate", ctypes.byref(self.handle), description, device, ctypes.c_uint(DEFAULT_STREAM))
        self.multiprocessors = int(resource.multiprocessors)

    def stream(self, priority: int = 0) -> torch.cuda.ExternalStream:
        found = ctypes.c_void_p()
        call("cuGreenCtxStreamCreate", ctypes.byref(found), self.handle, ctypes.c_uint(NON_BLOCKING), priority)
        assert found.value is not None
        return torch.cuda.ExternalStream(found.value)


def split(multiprocessors: int, parts: int) -> list[GreenContext]:
    """Parts of the current device, of so many multiprocessors each, that share none."""
    torch.cuda.init()
    torch.zeros((), device="cuda")  # the primary context
    device = torch.cuda.current_device()
    whole, rest = Resource(), Resource()
    groups = (Resource * parts)()
    call("cuDeviceGetDevResource", device, ctypes.byref(whole), SM)
    count, at_least = ctypes.c_uint(parts), ctypes.c_uint(multiprocessors)
    call(
        "cuDevSmResourceSplitByCount",
        *(groups, ctypes.byref(count), ctypes.byref(whole), ctypes.byref(rest), ctypes.c_uint(0), at_least),
    )
    assert count.value == parts, f"{whole.multiprocessors} multiprocessors make {count.value} parts, not {parts}"
    return [GreenContext(group, device) for group in groups]

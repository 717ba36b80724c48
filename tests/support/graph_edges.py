"""How the nodes of a CUDA graph follow each other."""

from __future__ import annotations

import ctypes

import torch


class _EdgeData(ctypes.Structure):
    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("_", ctypes.c_ubyte * 5),
    )


_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def driver_version() -> int:
    """As CUDA has it: 13000 is 13.0."""
    version = ctypes.c_int(0)
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value


def early_edges(graph: torch.cuda.CUDAGraph) -> list[bool]:
    """Of every edge whether its second node may begin before the first has ended. The graph was made with keep_graph."""
    get = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    assert get(handle, None, None, None, ctypes.byref(count)) == 0
    nodes, data = ctypes.c_void_p * count.value, (_EdgeData * count.value)()
    assert get(handle, nodes(), nodes(), data, ctypes.byref(count)) == 0
    return [edge.type == _PROGRAMMATIC for edge in data]

"""What "auto" sends of layers that quantize hidden states anyway."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torch_moe_ops.expert_parallel import payload


def fields(backend: str, device: str = "cuda") -> SimpleNamespace:
    return SimpleNamespace(
        act_format="nvfp4",
        a1_gscale=torch.tensor(1.0),
        router_weight_on_input=False,
        device=torch.device(device),
        backend=backend,
    )


@pytest.mark.parametrize(("backend", "name"), [("cuda_sm90", "plain"), ("flashinfer_cutlass", "quantized")])
def test_auto_depends_on_who_takes_the_codes(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "has_cuda_extension", lambda: True)
    chosen = payload.payload_of(fields(backend), "auto")  # type: ignore[arg-type]
    assert chosen.name == name
    assert ("loses more with codes" in chosen.reason) == (name == "plain")
    assert payload.payload_of(fields(backend), "quantized").name == "quantized"  # type: ignore[arg-type]
    assert payload.payload_of(fields("cpu", "cpu"), "auto").name == "quantized"  # type: ignore[arg-type]

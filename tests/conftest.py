"""Shared set-up: deterministic property tests, a seed per test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("moeq", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("moeq")

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def data_dir() -> Path:
    return DATA

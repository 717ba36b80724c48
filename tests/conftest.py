"""Shared set-up: deterministic property tests, a seed per test."""

from __future__ import annotations

from pathlib import Path

import pytest
import recording
import required
import torch
from hypothesis import settings
from paths import DATA

settings.register_profile("moeq", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("moeq")

# Small problems run up to 20 times slower where two threads wait for each other on a busy machine;
# the tests that are about threads set their own number.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    for made in (required.plugin(config), recording.plugin(config)):
        if made is not None:
            config.pluginmanager.register(made)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def data_dir() -> Path:
    return DATA

"""Fixtures of the GPU tests: one chain of stages per family, each run once. Skipped where torch sees no GPU.

Run them twice, without and with Transformer Engine on the path: `pytest tests/gpu`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))  # rig

if importlib.util.find_spec("megatron") and importlib.util.find_spec("modelopt"):
    from gpurig import FAMILIES, Chain
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def needs_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here: tests/gpu run on a machine with an NVIDIA GPU")


@pytest.fixture(autouse=True)
def one_failure_is_one_failure(needs_a_gpu: None) -> Iterator[None]:
    """modelopt 0.47 leaves torch's functions patched when a quantized forward raises, and each later one fails too."""
    from megatron.core.tensor_parallel import layers
    from torch.nn import functional

    before = {module: dict(vars(module)) for module in (functional, layers)}
    yield
    for module, names in before.items():
        vars(module).update(names)


@pytest.fixture(scope="session")
def chains(needs_a_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chain]:
    """The families' models; what a test asks of them is made at that moment, once."""
    return {name: Chain(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(params=["llama", "qwen3-moe", "kimi-k2"])
def chain(request: pytest.FixtureRequest, chains: dict[str, Chain]) -> Chain:
    return chains[request.param]


@pytest.fixture
def llama(chains: dict[str, Chain]) -> Chain:
    return chains["llama"]

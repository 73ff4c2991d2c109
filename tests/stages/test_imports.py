"""What a stage's start does not import, and that each part of mlmsub.runtime.models.imports is still needed for it."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rig import make_tokenizer

from mlmsub.runtime.models import imports

TRAINER = {
    "transformers.trainer", "datasets", "modelopt.torch.quantization.plugins.huggingface",
    "transformers.modeling_utils", "scipy.stats", "scipy.interpolate", "scipy.spatial", "scipy.optimize",
    "megatron.core.resharding.execution",
}  # fmt: skip
COMPILER = {"torch._inductor.compile_fx", "torch._dynamo"}
TELL = """
import contextlib, json, os, sys
if sys.argv[1] == "plain":
    from mlmsub.runtime.models import imports
    imports.lean = contextlib.nullcontext
from mlmsub.runtime.models import model
model.prepare()
import gc, torch
from megatron.core.transformer.moe import router
said = {"modules": [name for name, module in sys.modules.items() if module], "gc": gc.isenabled()}
said["compile"] = torch.compile.__module__
os.write(3, json.dumps(said).encode())
"""


def _start(how: str, folder: Path) -> dict[str, object]:
    out = folder / f"{how}.json"
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    # the libraries print on stdout and stderr
    with out.open("wb") as file:
        done = subprocess.run(
            ["bash", "-c", 'exec "$@" 3>&1 >&2', "bash", sys.executable, "-c", TELL, how],
            env=environment, stdout=file, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, object] = json.loads(out.read_text())
    return said


def test_a_start_imports_neither_the_compiler_nor_a_trainer(tmp_path: Path) -> None:
    said = _start("lean", tmp_path)
    modules = set(said["modules"])  # type: ignore[call-overload]
    assert {"megatron.training.arguments", "modelopt.torch.quantization.plugins.megatron"} <= modules
    assert not modules & (TRAINER | COMPILER)
    assert said["gc"] is True
    assert said["compile"] == "torch"


def test_the_libraries_import_both_by_themselves(tmp_path: Path) -> None:
    """If not, without_plugins and compiled_when_called have had their time."""
    modules = set(_start("plain", tmp_path)["modules"])  # type: ignore[call-overload]
    assert modules >= COMPILER
    installed = {name for name in TRAINER if importlib.util.find_spec(name.partition(".")[0])}
    assert modules >= installed


def test_what_is_left_out_can_be_imported_later() -> None:
    with imports.without_plugins(), pytest.raises(ModuleNotFoundError, match="left out"):
        importlib.import_module("modelopt.torch.quantization.plugins.vllm")
    plugin = importlib.import_module("modelopt.torch.quantization.plugins.huggingface")
    assert plugin._is_quant_fused_experts_module(torch.nn.Linear(1, 1)) is False


def test_what_is_handed_out_instead_is_the_real_one_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = importlib.import_module("transformers")
    monkeypatch.delitem(sys.modules, "scipy.stats", raising=False)
    monkeypatch.delitem(vars(transformers), "AutoProcessor", raising=False)
    with imports.without_scipy(), imports.without_processors():
        from scipy.stats import entropy
        from transformers import AutoProcessor
    assert float(entropy([0.5, 0.5], [0.25, 0.75])) == pytest.approx(0.1438, abs=1e-4)
    with pytest.raises(OSError, match="is copied, not loaded"):
        AutoProcessor.from_pretrained("/nowhere/at/all")
    assert transformers.AutoProcessor.__module__.startswith("transformers.")
    assert importlib.import_module("scipy.stats").norm is not None


def test_a_tokenizer_brings_no_way_to_generate_text(tmp_path: Path) -> None:
    """Which would bring the compiler, and scikit-learn where it is installed. Afterwards it is the real one."""
    make_tokenizer(tmp_path)
    ask = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from mlmsub.runtime.models import model
model.prepare()
from mlmsub.runtime.checkpoints import hf
assert hf.tokenizer(Path({str(tmp_path)!r}), SimpleNamespace(trust_remote_code=False))("tea")["input_ids"]
assert "transformers.generation.utils" not in sys.modules and "torch._dynamo" not in sys.modules
from transformers import GenerationMixin
assert GenerationMixin.generate
"""
    path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", ask], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_decorated_function_is_compiled_once_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compiler(function: object, **options: object) -> object:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    with imports.compiled_when_called():

        @torch.compile
        def plain(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def dynamic(x: int) -> int:
            return x + 2

        module = torch.nn.Linear(1, 1)
        assert torch.compile(module) is module, "a model is compiled as ever"
    assert torch.compile is compiler
    assert compiled == [{}]
    assert (plain(1), dynamic(1), dynamic(2)) == (2, 3, 4)
    assert compiled == [{}, {}, {"dynamic": True}]
    assert plain.__name__ == "plain"


def test_megatrons_fused_functions_compute_the_same_when_compiled_late() -> None:
    from megatron.core.fusions import fused_bias_swiglu

    x = torch.randn(4, 16)
    one, other = x.chunk(2, -1)
    assert torch.allclose(fused_bias_swiglu.swiglu(x), torch.nn.functional.silu(one) * other, atol=1e-6)


def test_modelopts_formats_are_the_same_by_either_yaml_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelopt.torch.opt import config_loader

    text = (Path(config_loader.__file__).parents[3] / "modelopt_recipes").rglob("*.y*ml")
    files = [file.read_text() for file in text]
    assert len(files) > 100
    by_python = [list(yaml.safe_load_all(file)) for file in files[:40]]
    loaders = []
    monkeypatch.setattr(yaml, "load_all", lambda stream, loader: loaders.append(loader) or [])
    with imports.yaml_in_c():
        yaml.safe_load_all("a: 1")
        assert yaml.SafeLoader is yaml.CSafeLoader
    assert yaml.SafeLoader is not yaml.CSafeLoader
    assert loaders == [yaml.CSafeLoader], "modelopt reads by safe_load_all"
    monkeypatch.undo()
    with imports.yaml_in_c():
        assert [list(yaml.safe_load_all(file)) for file in files[:40]] == by_python


def test_packages_are_those_of_the_standard_library() -> None:
    from transformers.utils import import_utils

    theirs = importlib.metadata.packages_distributions()
    with imports.packages_by_record():
        ours = importlib.metadata.packages_distributions()
    asked = [name for name in theirs if name.isidentifier() and not name.startswith("__")]
    assert {"torch", "yaml", "transformers", "modelopt"} <= set(asked)
    for name in asked:
        assert sorted(set(ours[name])) == sorted(set(theirs[name])), name
    assert import_utils.PACKAGE_DISTRIBUTION_MAPPING["torch"] == ["torch"], "it still asks at once"


def test_the_collector_is_on_again_after_an_error() -> None:
    gc.unfreeze()  # as in a process that has imported nothing yet
    with pytest.raises(KeyError), imports.without_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()

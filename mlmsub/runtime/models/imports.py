"""The libraries' imports without the seconds that no stage needs. Each function names its library and its reason.

They are in force inside ``lean`` only: what is left out there can be imported afterwards. tests/stages/test_imports.py
fails when a library no longer needs one.
"""

import functools
import gc
import importlib
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

# below modelopt.torch
_PLUGINS = (
    "opt.plugins.transformers", "opt.plugins.diffusers", "opt.plugins.peft", "distill.plugins.huggingface",
    "quantization.plugins.accelerate", "quantization.plugins.diffusion", "quantization.plugins.fairscale",
    "quantization.plugins.huggingface", "quantization.plugins.peft", "quantization.plugins.pytorch_geometric",
    "quantization.plugins.transformers", "quantization.plugins.transformers_trainer", "quantization.plugins.trl",
    "quantization.plugins.vllm", "speculative.plugins.hf_dflash",
)  # fmt: skip


@contextmanager
def lean() -> Iterator[None]:
    """Imports torch; the body imports Megatron and modelopt."""
    with without_garbage_collection():
        importlib.import_module("torch")
        with ExitStack() as stack:
            for part in (
                compiled_when_called, without_plugins, without_compiler, without_scipy, without_resharding, yaml_in_c,
                packages_by_record, without_processors,
            ):  # fmt: skip
                stack.enter_context(part())
            yield


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """CPython 3.12: modules make some million objects that stay, and the collector looks at them again and again.

    Once a process: a later freeze would keep for ever what a model that is gone has left to collect.
    """
    if gc.get_freeze_count():
        yield
        return
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()  # nor does it look at them later


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it the garbage collector does not run, which looks at all of the process for every so many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """megatron-core 0.19.2, modelopt 0.47: functions decorated with torch.compile import the compiler at once.

    A stage calls few of them or none. What is decorated with ``megatron.core.jit.jit_fuser`` later is treated alike.
    """
    import torch

    compile_now = torch.compile

    def decorate(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(decorate, **options)
        if not inspect.isfunction(function):
            return compile_now(function, **options)
        return _when_called(function, functools.partial(compile_now, **options))

    with _replaced(torch, "compile", decorate):
        yield


def _when_called(function: Any, compile_now: Callable[[Any], Any]) -> Callable[..., Any]:
    compiled = functools.cache(lambda: compile_now(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@contextmanager
def without_plugins() -> Iterator[None]:
    """modelopt 0.47: it imports all that it has for models of transformers, diffusers, peft, trl, vLLM, ...

    The Trainer among it brings datasets, pandas and scikit-learn. Models here are Megatron's, so these plugins are said
    to be missing, which modelopt expects of a plugin.
    """
    finder = _Refuse(frozenset(f"modelopt.torch.{name}" for name in _PLUGINS))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Refuse:
    """A finder of modules that says of some that they do not exist, and nothing of others."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"{name} is left out", name=name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """modelopt 0.47: it imports torch._dynamo by name, so that peft, which no stage has, does not do it in between."""
    import_now = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        return None if name == "torch._dynamo" else import_now(name, package)

    with _replaced(importlib, "import_module", import_module):
        yield


@contextmanager
def without_scipy() -> Iterator[None]:
    """modelopt 0.47: parts of scipy for the entropy of a histogram, searches and fits that no stage makes."""
    with (
        _called_when_needed("scipy.stats", "entropy"),
        _called_when_needed("scipy.optimize", "curve_fit"),
        _called_when_needed("scipy.interpolate", "LinearNDInterpolator", "interp1d"),
        _called_when_needed("scipy.spatial", QhullError=RuntimeError),  # which it is a kind of
    ):
        yield


@contextmanager
def without_resharding() -> Iterator[None]:
    """megatron-core 0.19.2: weights of a training go to an inference model of another layout by it; with it come
    nvshmem's and CUDA's Python packages, where they are installed."""
    package = "megatron.core.resharding"
    with _called_when_needed(package), _called_when_needed(f"{package}.refit", "swap_model_weights"):
        yield


@contextmanager
def _called_when_needed(name: str, *functions: str, **others: Any) -> Iterator[None]:
    """Within it module ``name`` has these functions alone, which import the real one when they are called."""
    if name in sys.modules:
        yield
        return
    stand_in: Any = types.ModuleType(name)
    stand_in.__path__ = []
    vars(stand_in).update(others)
    for function in functions:
        setattr(stand_in, function, functools.partial(_call, name, function))
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


def _call(module: str, function: str, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*args, **options)


@contextmanager
def without_generation() -> Iterator[None]:
    """transformers 5.14: its tokenizers import its own way to generate text, with scikit-learn and the compiler.

    Not in ``lean``: it is for the first tokenizer. Remote code of models, which no stage runs, would not be given it.
    """
    names = vars(importlib.import_module("transformers.generation"))
    if "GenerationMixin" in names:
        yield
        return
    names["GenerationMixin"] = type("GenerationMixin", (), {})
    try:
        yield
    finally:
        del names["GenerationMixin"]


@contextmanager
def without_processors() -> Iterator[None]:
    """modelopt 0.47's exporter imports transformers' processors: with them all of its models' base, and the compiler.

    It wants the image processor's config.json written, and copies the source's own with its other files all the same.
    """
    names = vars(importlib.import_module("transformers"))
    if "AutoProcessor" in names:
        yield
        return
    names["AutoProcessor"] = _NoProcessor
    try:
        yield
    finally:
        del names["AutoProcessor"]


class _NoProcessor:
    """What modelopt takes for a checkpoint without a processor."""

    @staticmethod
    def from_pretrained(folder: object, **_options: Any) -> None:
        raise OSError(f"the processor of {folder} is copied, not loaded")


@contextmanager
def yaml_in_c() -> Iterator[None]:
    """modelopt 0.47: it reads its formats from 200 YAML texts with PyYAML's parser in Python; there is one in C."""
    import yaml

    with _replaced(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        yield


@contextmanager
def packages_by_record() -> Iterator[None]:
    """transformers 5.14 asks at once which distribution has which package.

    CPython 3.12 looks on the disk for each file of each distribution to say so.
    """
    with _replaced(importlib.metadata, "packages_distributions", _packages_distributions):
        yield


def _packages_distributions() -> dict[str, list[str]]:
    """The standard library's answer, from the lists of files alone."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        packages = set((distribution.read_text("top_level.txt") or "").split())
        if not packages:
            files = (line.partition(",")[0] for line in (distribution.read_text("RECORD") or "").splitlines())
            packages = {file.split("/")[0] if "/" in file else inspect.getmodulename(file) or "" for file in files}
        for package in packages:
            if package and "." not in package:
                found.setdefault(package, []).append(distribution.metadata["Name"])
    return found


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

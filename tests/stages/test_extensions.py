"""Compiled extensions are built once, published whole, and never waited for without a bound."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modelopt.torch.quantization import extensions as modelopt_extensions
from rig import ROOT

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.quantization import extensions

NAME = "tiny_extension"
SOURCE = f"""
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) {{ return PyLong_FromLong(42); }}
static PyMethodDef methods[] = {{{{"answer", answer, METH_NOARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{NAME}", "", -1, methods}};
PyMODINIT_FUNC PyInit_{NAME}(void) {{ return PyModule_Create(&module); }}
"""
# asks for the extension as a process of its own, saying when it builds
ASK = """
import importlib.util, os, sys, time
from pathlib import Path
from mlmsub.runtime.quantization.extensions import shared_library

name, root, source, log, pause = sys.argv[1:]

def build(scratch):
    from torch.utils.cpp_extension import load
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(float(pause))
    (scratch / name).mkdir()
    load(name, [source], build_directory=str(scratch / name), is_python_module=False, is_standalone=False)

path = shared_library(name, Path(root), build)
spec = importlib.util.spec_from_file_location(name, path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(path, module.answer())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's."""
    made = Path(tempfile.mkdtemp(prefix="mlmsub-test-"))
    made.chmod(0o755)
    (made / "tiny.cpp").write_text(SOURCE)
    yield made
    shutil.rmtree(made)


def ask(place: Path, pause: float = 0) -> subprocess.Popen:
    words = [NAME, place / "cache", place / "tiny.cpp", place / "log", pause]
    return subprocess.Popen(
        [sys.executable, "-c", ASK, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out.splitlines()[-1]


def builds(place: Path) -> int:
    log = place / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def write(scratch: Path) -> None:
    """A build that takes no time."""
    (scratch / NAME).mkdir()
    (scratch / NAME / f"{NAME}.so").write_text("built")


def refuse(_scratch: Path) -> None:
    raise AssertionError("built again")


def test_processes_that_come_at_once_compile_once(place: Path) -> None:
    both = [ask(place, pause=0.5), ask(place, pause=0.5)]
    assert [answer(process) for process in both] == [f"{place}/cache/{NAME}/{NAME}.so 42"] * 2
    assert builds(place) == 1
    assert sorted(path.name for path in (place / "cache").iterdir()) == [f".{NAME}.lock", NAME]
    assert extensions.shared_library(NAME, place / "cache", refuse).is_file()


def test_a_killed_builder_holds_nobody_up(place: Path) -> None:
    process = ask(place, pause=600)
    end = time.monotonic() + 60
    while not builds(place) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    cache = place / "cache"
    assert [path.name for path in cache.iterdir() if path.name.startswith(extensions.SCRATCH)]
    # what torch and a broken copy would leave
    (cache / NAME).mkdir()
    (cache / NAME / "lock").touch()
    assert extensions.shared_library(NAME, cache, write).read_text() == "built"
    assert sorted(path.name for path in cache.iterdir()) == [f".{NAME}.lock", NAME]


def test_waiting_for_a_builder_has_an_end(place: Path) -> None:
    cache = place / "cache"
    cache.mkdir()
    with (cache / f".{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        own = extensions.shared_library(NAME, cache, write, wait_s=0.2)
    assert own.read_text() == "built"
    assert cache not in own.parents
    assert not (cache / NAME).exists()


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """As root every folder can be written to."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_folder_is_used_if_it_is_complete_and_else_left_alone(place: Path) -> None:
    cache = place / "cache"
    made = extensions.shared_library(NAME, cache, write)
    (cache / "other").mkdir()
    cache.chmod(0o555)
    with ordinary_user():
        assert extensions.shared_library(NAME, cache, refuse) == made
        own = extensions.shared_library("other", cache, lambda scratch: rename(scratch, "other"))
        assert own.read_text() == "built"
        nowhere = extensions.shared_library(NAME, place / "log" / "x", write)
    assert cache not in own.parents and place not in nowhere.parents
    assert not list((cache / "other").iterdir())
    cache.chmod(0o755)


def rename(scratch: Path, name: str) -> None:
    write(scratch)
    (scratch / NAME / f"{NAME}.so").rename(scratch / NAME / f"{name}.so")
    (scratch / NAME).rename(scratch / name)


def test_a_failed_build_leaves_nothing_and_is_told(place: Path) -> None:
    def fail(scratch: Path) -> None:
        write(scratch)
        raise RuntimeError("nvcc: not found")

    with pytest.raises(RuntimeError, match="nvcc"):
        extensions.shared_library(NAME, place / "cache", fail)
    assert [path.name for path in (place / "cache").iterdir()] == [f".{NAME}.lock"]
    assert extensions.shared_library(NAME, place / "cache", write).is_file()


class Quantizer(torch.nn.Module):
    """What `needed` looks at."""

    is_enabled = True

    def __init__(self, num_bits: object, block_sizes: dict | None = None) -> None:
        super().__init__()
        self.num_bits, self.block_sizes = num_bits, block_sizes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, place: Path) -> Env:
    """A node that has a GPU and no compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(extensions.distributed, "gather", lambda value: [value])
    monkeypatch.setattr(extensions.formats, "quantizers", lambda model: model.named_children())
    for getter in (modelopt_extensions.get_cuda_ext_fp8, modelopt_extensions.get_cuda_ext):
        monkeypatch.delattr(getter, "extension", raising=False)
    monkeypatch.setenv("PATH", str(place))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    return Env({"MLMSUB_EXTENSIONS_DIR": str(place / "cache")})


def test_without_a_compiler_fp8_is_eager_and_one_line_says_so(
    gpu: Env, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.0")
    extensions.prepare(gpu, torch.nn.Sequential(Quantizer((4, 3)), Quantizer((2, 1))))
    assert modelopt_extensions.get_cuda_ext_fp8() is None
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert "eager" in line and extensions.FP8 in line
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "7.5 8.0"
    assert "TORCH_EXTENSIONS_DIR" not in os.environ


def test_a_few_forwards_do_not_compile(gpu: Env, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(Quantizer((4, 3)))
    extensions.prepare(gpu, model, compile_fp8=False)
    assert modelopt_extensions.get_cuda_ext_fp8() is None
    assert capsys.readouterr().out == ""
    extensions.prepare(gpu, model)
    assert "WARNING" in capsys.readouterr().out, "the eager form was not chosen for good"


def test_without_a_compiler_a_format_that_has_no_eager_form_is_refused(gpu: Env) -> None:
    with pytest.raises(StageError, match="nvcc"):
        extensions.prepare(gpu, torch.nn.Sequential(Quantizer(8)))


def test_the_folder_is_named_after_what_the_binary_depends_on(gpu: Env) -> None:
    name = extensions.folder(gpu).name
    for part in (f"torch-{torch.__version__}", f"cuda-{torch.version.cuda}", "sm90", "modelopt-"):
        assert part in name
    shared = extensions.folder(Env({"TORCH_EXTENSIONS_DIR": "/a", "XDG_CACHE_HOME": "/b"}))
    assert shared == Path("/a/mlmsub") / name
    assert extensions.folder(Env({"XDG_CACHE_HOME": "/b"})) == Path("/b/torch_extensions/mlmsub") / name


def test_a_model_needs_the_kernels_of_its_enabled_quantizers(gpu: Env) -> None:
    mx = Quantizer((4, 3), {"type": "dynamic", "scale_bits": (8, 0)})
    model = torch.nn.Sequential(mx, Quantizer((2, 1)), Quantizer(4))
    assert extensions.needed(model) == {extensions.MX, extensions.INTEGER}
    assert extensions.needed(SimpleNamespace(named_children=lambda: iter([("", Quantizer((4, 3)))]))) == {
        extensions.FP8
    }

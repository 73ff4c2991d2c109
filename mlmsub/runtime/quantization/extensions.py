"""modelopt's CUDA kernels of the fake-quantized forward: compiled once per node, found by every later process.

modelopt compiles them by ``torch.utils.cpp_extension.load`` in the first forward that needs one, about a minute in
every fresh container, and the ranks that do not compile wait for torch's ``FileBaton``: a lock file that a process
which died leaves behind, and for which the others then wait for ever. Here each node compiles before the forward, in a
folder of its own that is renamed into place when it is whole, under a lock that the kernel frees with its owner.
"""

import atexit
import fcntl
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import formats

FP8, INTEGER, MX = "modelopt_cuda_ext_fp8", "modelopt_cuda_ext", "modelopt_cuda_ext_mx"
# for another process's build; the process group's own timeout, for which the other ranks wait, is 10 minutes
WAIT_S = 240.0
SCRATCH = ".build-"


def prepare(env: Env, model: Any, compile_fp8: bool = True) -> None:
    """Have the kernels of this model's enabled quantizers ready. All ranks call it, before a fake-quantized forward.

    Max calibration only watches, so it needs none. The first process of each node compiles what is not there yet;
    the others load its result. Without a compiler FP8 runs in modelopt's eager form, and one line says so. A few
    forwards are sooner done than a compilation: with ``compile_fp8=False`` FP8's kernel is used if it is there.

    Raises:
        StageError: on every rank, if a kernel that has no eager form cannot be had.
    """
    import torch

    if not torch.cuda.is_available():
        return
    for name in sorted(set().union(*distributed.gather(needed(model)))):
        if name == FP8 and not compile_fp8:
            _use_if_built(env, name)
        else:
            _prepare(env, name)


def prepare_evaluation(env: Env, model: Any) -> None:
    """Look whether the quantizers of a model that is only evaluated are calibrated, and have their kernels ready.

    FP8's is used if the node has it and not compiled else: most evaluations end sooner in the eager form.
    """
    formats.check_calibrated(model)
    prepare(env, model, compile_fp8=False)


def prepare_formats(env: Env, configs: list[formats.Config]) -> None:
    """The same before a model is quantized, for a calibration that runs the model in these formats (AWQ, a search)."""
    import torch

    if torch.cuda.is_available():
        kinds = [
            (one.get("num_bits", 8), one.get("block_sizes") or {}) for made in configs for one in formats.numerics(made)
        ]
        for name in sorted({name for bits, blocks in kinds for name in _extensions(bits, blocks)}):
            _prepare(env, name)


def needed(model: Any) -> set[str]:
    """Names of the extensions that the fake-quantized forward of this rank's part calls."""
    kinds = [(quantizer.num_bits, quantizer.block_sizes or {}) for _, quantizer in formats.quantizers(model)]
    return {name for bits, blocks in kinds for name in _extensions(bits, blocks)}


def _extensions(bits: Any, blocks: dict[Any, Any]) -> set[str]:
    """What modelopt 0.47 calls for these numerics. NVFP4's kernel is Triton's, which compiles without nvcc."""
    if blocks.get("type") == "dynamic" and tuple(blocks.get("scale_bits") or ()) == (8, 0):
        return {MX}
    if isinstance(bits, int):
        return {INTEGER}
    return {FP8} if tuple(bits) == (4, 3) else set()


def folder(env: Env) -> Path:
    """Where built extensions are kept: everything that a binary depends on is part of its name.

    ``MLMSUB_EXTENSIONS_DIR`` may name one that several nodes and jobs share, and that may be read-only.
    """
    import modelopt
    import torch

    cache = env.path("XDG_CACHE_HOME") or Path(env.text("HOME", tempfile.gettempdir()) or "") / ".cache"
    root = env.path("MLMSUB_EXTENSIONS_DIR") or env.path("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions"
    key = (
        f"modelopt-{modelopt.__version__}",
        f"torch-{torch.__version__}",
        f"cuda-{torch.version.cuda}",
        "sm" + "".join(map(str, torch.cuda.get_device_capability())),
        f"py{platform.python_version_tuple()[0]}{platform.python_version_tuple()[1]}-{platform.machine()}",
    )
    return root / "mlmsub" / "_".join(key)


def shared_library(name: str, root: Path, build: Callable[[Path], None], wait_s: float = WAIT_S) -> Path:
    """The file ``root/name/name.so``, made by ``build(scratch)`` as ``scratch/name/name.so`` if it is not there.

    Processes that come at once build once. The folder appears by a rename, so what is there is complete. Where
    nothing can be written or locked, or another process builds for longer than ``wait_s``, it is built for this
    process alone, and removed at its end. What ``build`` raises passes through.
    """
    library = root / name / f"{name}.so"
    if library.is_file():
        return library
    with ExitStack() as held:
        try:
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(_lock(root / f".{name}.lock", library.is_file, wait_s))
            if library.is_file():
                return library
            _remove_leftovers(root, name)
            scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{name}-", dir=root))
            held.callback(shutil.rmtree, scratch, ignore_errors=True)
        except OSError as error:
            say(f"{name}: {root} cannot be used ({error}); it is built for this process alone")
            return _private(name, build)
        build(scratch)
        (scratch / name).replace(library.parent)
    return library


def _prepare(env: Env, name: str) -> None:
    """One extension on all ranks: the first process of each node gets it, then the others load that file."""
    first = env.local_rank == 0
    gathered = distributed.gather(_get(env, name) if first else ("", ""))  # also where the others wait
    if not first:
        path, problem = gathered[env.rank - env.local_rank]
        gathered = distributed.gather(("", problem or _load(name, Path(path))))
    else:
        gathered = distributed.gather(gathered[env.rank])
    problems = sorted({problem for _, problem in gathered if problem})
    if not problems:
        return
    if name != FP8:
        raise StageError(name, problems[0], "use an image with nvcc, ninja and a C++ compiler, or another format.")
    _use(name, None)  # on all ranks alike, and so that no forward starts to compile
    warn(f"{name}: {problems[0]} FP8 is computed by modelopt's eager form: slower.")


def _use_if_built(env: Env, name: str) -> None:
    """Load the extension if every rank finds it, else leave all to the eager form."""
    path = folder(env) / name / f"{name}.so"
    if any(distributed.gather(_load(name, path))):
        _use(name, None)


def _get(env: Env, name: str) -> tuple[str, str]:
    """Build or find the extension and load it: its file, and what went wrong (or an empty string)."""
    start = time.monotonic()
    try:
        path = shared_library(name, folder(env), lambda scratch: _compile(name, scratch))
    except (RuntimeError, OSError) as error:
        return "", f"it could not be built ({' '.join(str(error).split())[:200]})."
    problem = _load(name, path)
    if not problem:
        say(f"{name}: ready after {time.monotonic() - start:.1f} s in {path.parent}")
    return str(path), problem


def _compile(name: str, scratch: Path) -> None:
    """Let modelopt compile its extension, in ``scratch`` and for the present GPU's architecture alone."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    # NGC's images list every architecture here; each one costs a compilation
    wanted = {"TORCH_EXTENSIONS_DIR": str(scratch), "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    getter = _getter(name)
    vars(getter).pop("extension", None)  # it may have been left to the eager form
    try:
        getter(raise_if_failed=True)
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _load(name: str, path: Path) -> str:
    """Make modelopt use the extension in this file; what went wrong, or an empty string."""
    if getattr(_getter(name), "extension", None) is not None:
        return ""
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            return f"{path} is no extension module."
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return f"{path} cannot be loaded ({error})."
    _use(name, module)
    return ""


def _use(name: str, module: Any) -> None:
    _getter(name).extension = module


def _getter(name: str) -> Any:
    """modelopt's function that returns the extension; it keeps it in its attribute ``extension``."""
    from modelopt.torch.quantization import extensions

    return {FP8: extensions.get_cuda_ext_fp8, INTEGER: extensions.get_cuda_ext, MX: extensions.get_cuda_ext_mx}[name]


def _private(name: str, build: Callable[[Path], None]) -> Path:
    scratch = Path(tempfile.mkdtemp(prefix=f"mlmsub-{name}-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    build(scratch)
    return scratch / name / f"{name}.so"


def _remove_leftovers(root: Path, name: str) -> None:
    """What a killed process left; the caller holds the lock, so nobody works on it."""
    for left in (*root.glob(f"{SCRATCH}{name}-*"), root / name):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _lock(file: Path, ready: Callable[[], bool], wait_s: float) -> Iterator[None]:
    """Hold the lock of ``file``, or go on without it once ``ready()``; TimeoutError after ``wait_s`` seconds."""
    end = time.monotonic() + wait_s
    with file.open("a") as stream:
        while not ready():
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has been building for {wait_s:.0f} s") from None
                time.sleep(0.1)
        yield

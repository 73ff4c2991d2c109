"""mlmsub's own files: the data folders conf/, slurm/, container/, workflows/, and the runtime's code for the bundle."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_RUNTIME_FILES = (".py", ".txt", ".jsonl")


@cache
def root() -> Path:
    """The folder that holds these: beside the package in a checkout, inside it in a wheel."""
    packed = _PACKAGE / "data"
    return packed if packed.is_dir() else _PACKAGE.parent


@cache
def for_bundle() -> Mapping[str, bytes]:
    """Everything that may go into a bundle, by path: `container/...`, `slurm/...`, `mlmsub/...`. Read once."""
    found = [
        root() / "container/entrypoint.sh",
        root() / "slurm/job.sbatch.j2",
        root() / "slurm/attempts.sh",
        *(root() / "slurm/local").iterdir(),
    ]
    files = {str(path.relative_to(root())): path.read_bytes() for path in found}
    code = [path for path in (_PACKAGE / "runtime").rglob("*") if path.suffix in _RUNTIME_FILES]
    code.append(_PACKAGE / "__init__.py")
    files |= {f"mlmsub/{path.relative_to(_PACKAGE)}": path.read_bytes() for path in code}
    return files


@cache
def conf_names() -> tuple[str, ...]:
    """The models of the catalogue, `org/model`."""
    folder = root() / "conf"
    return tuple(sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/*.yaml")))

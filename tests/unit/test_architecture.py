"""The house of the design: which way imports point, how large a room may be, who looks at the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "mlmsub").rglob("*.py"))
# what each room may import of the others
MAY_IMPORT = {
    "cli": {"app", "core", "slurm", "transport"},
    "app": {"core", "slurm", "transport"},
    "slurm": {"core"},
    "core": set(),
    "transport": set(),
    "runtime": set(),
}
CORE_MAY_NOT = {"os", "subprocess", "time", "pathlib", "socket", "shutil", "tempfile", "datetime", "random", "secrets"}
RUNTIME_MAY_NOT = {"typer", "click", "paramiko", "jinja2"}


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "mlmsub").parts
    return parts[0] if len(parts) > 1 else ""


def imports(path: Path) -> Iterator[str]:
    """The full names of all that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in MODULES if room(p)], ids=named)
def test_imports_point_down_only(path: Path) -> None:
    own = room(path)
    for name in imports(path):
        if name.startswith("mlmsub.") and name != "mlmsub.__version__":
            other = name.split(".")[1]
            assert other == own or other in MAY_IMPORT[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", [p for p in MODULES if room(p) == "runtime"], ids=named)
def test_the_runtime_stands_alone(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] not in RUNTIME_MAY_NOT, name


@pytest.mark.parametrize("path", [p for p in MODULES if room(p) == "core"], ids=named)
def test_the_core_does_no_io(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & CORE_MAY_NOT
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id in ("open", "print", "input")]


@pytest.mark.parametrize("path", [p for p in MODULES if room(p) not in ("cli", "transport", "runtime")], ids=named)
def test_only_the_command_line_prints_and_exits(path: Path) -> None:
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not {"print", "sys.exit", "exit", "os._exit"} & set(calls)


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_size_is_a_feature(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 60, f"{node.name} is too long"


# The runtime's variables are its input, handed to it by the entrypoint. A transport starts the user's own ssh, and
# its prompts, in the user's environment.
READS_THE_ENVIRONMENT = ("mlmsub/app/config.py", "mlmsub/runtime/", "mlmsub/transport/")


@pytest.mark.parametrize("path", [p for p in MODULES if not named(p).startswith(READS_THE_ENVIRONMENT)], ids=named)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    found = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert not {"os.environ", "os.getenv", "os.environb", "os.putenv"} & set(found)
    assert not [name for name in imports(path) if name in ("os.environ", "os.getenv")]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["submit", "--help"], ["profile", "--help"]])
def test_help_does_not_wait_for_large_libraries(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom mlmsub.cli import main\n"
        "try:\n    main.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'paramiko', 'jinja2', 'yaml', 'torch', 'megatron', 'modelopt'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip


# --- what travels in the wheel --------------------------------------------------------------


def test_the_data_folders_travel_inside_the_wheel() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {name: f"mlmsub/data/{name}" for name in ("conf", "slurm", "container", "workflows")}


@pytest.mark.parametrize(
    "path",
    ["container/entrypoint.sh", "slurm/job.sbatch.j2",
     "slurm/local/srun", "slurm/local/scontrol", "slurm/local/start.sh",
     "mlmsub/slurm/remote/submit.sh", "mlmsub/slurm/remote/status.sh", "mlmsub/slurm/remote/log.sh",
     "mlmsub/slurm/remote/cancel.sh", "mlmsub/slurm/remote/workflow.sh", "mlmsub/slurm/remote/results.sh",
     "workflows/kimi_k2_eagle3.yaml", "conf/moonshotai/kimi_k2_instruct.sh", "conf/moonshotai/Kimi-K2-Instruct.yaml"],
)  # fmt: skip
def test_a_data_file_is_there_and_not_ignored(path: str) -> None:
    assert (ROOT / path).is_file()
    ignored = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, timeout=10)
    assert ignored.returncode != 0, "hatch leaves out what git ignores"


def test_every_file_of_a_data_folder_is_known() -> None:
    known = re.compile(
        r"conf/[^/]+/[^/]+\.(yaml|sh)|slurm/job\.sbatch\.j2|slurm/attempts\.sh|slurm/env_setup_template\.sh|"
        r"slurm/local/(srun|scontrol|start\.sh)|container/(entrypoint\.sh|requirements\.txt|Dockerfile)|"
        r"workflows/\w+\.yaml|mlmsub/slurm/remote/\w+\.sh|mlmsub/runtime/\w+/\w+\.(txt|jsonl)"
    )
    folders = [ROOT / name for name in ("conf", "slurm", "container", "workflows", "mlmsub")]
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    unknown = [named(p) for p in files if not known.fullmatch(named(p)) and p.name != "py.typed"]
    assert unknown == []


@pytest.mark.parametrize("folder", ["mlmsub", "conf", "slurm", "container", "workflows"])
def test_nothing_that_ships_names_this_machine(folder: str) -> None:
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert not re.search(rb"/work/|/tmp/dev|localhost:\d", path.read_bytes()), path

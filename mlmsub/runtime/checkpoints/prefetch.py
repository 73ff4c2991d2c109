"""Downloads from the Hugging Face Hub: one process of the run asks and fetches, the others wait.

Where HF_HOME is on storage that all nodes see, that is one process of the job; a node that does not see what was
fetched gets one of its own. A marker beside the files says that they are whole, so that a restart asks nothing. The
waiting goes through the rendezvous store and not through a collective, which would time out.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import say

INDEX = "model.safetensors.index.json"
SMALL = (".json", ".py", ".model", ".txt", ".jinja", ".tiktoken", ".vocab")
DATA = (".parquet", ".jsonl")
SECONDS = 0.5  # between two looks at the store


@dataclass(frozen=True)
class Wanted:
    """Files of one hub repository. ``choose`` picks them from all its names; ``label`` tells choices apart."""

    kind: str  # the hub's repo_type: model or dataset
    repository: str
    label: str
    choose: Callable[[list[str]], list[str]]
    field: str  # what the user set to get it
    fix: str
    unset: bool = False  # or did not set, so that a default was taken

    @property
    def place(self) -> Path:
        """Where huggingface_hub keeps this repository."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.repository, repo_type=self.kind)

    @property
    def marker(self) -> Path:
        return self.place / f"mlmsub-{self.label}.json"


def model(repository: str, env: Env, *, weights: bool, unset: bool = False) -> Path:
    """The local folder of a model of the hub; all ranks call it and get the same, or the same StageError.

    Only the files beside the model's config are taken, and of the weights only safetensors (where there are none:
    .bin). Without ``weights``, only configs, tokenizer and code.
    """
    wanted = Wanted(
        "model", repository, "weights" if weights else "config",
        lambda names: _model_files(names, weights), "HF_MODEL_CKPT",
        "set HF_MODEL_CKPT to a local Hugging Face checkpoint folder.", unset,
    )  # fmt: skip
    return _get(wanted, env)


def dataset(name: str, env: Env, *, split: str = "train", files: int = 1, field: str = "--calib-data") -> list[Path]:
    """The first ``files`` .parquet or .jsonl files of a hub data set, those of ``split`` if any name says so.

    All ranks call it and get the same, or the same StageError.
    """
    wanted = Wanted(
        "dataset", name, f"{split}-{files}", lambda names: _data_files(names, split)[:files], field,
        f"give {field} a local .jsonl, .parquet or .txt file.",
    )  # fmt: skip
    folder = _get(wanted, env)
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in DATA]
    return [folder / part for part in _data_files(found, split)[:files]]


def _get(wanted: Wanted, env: Env) -> Path:
    """The folder with the wanted files, the same on all ranks of a node; StageError on all ranks if one has none."""
    key = f"mlmsub/{wanted.kind}/{wanted.repository}/{wanted.label}"
    problem = _fetched(wanted, key) if env.rank == 0 else ""
    _wait(key)
    found = _look_up(wanted)
    told = distributed.gather((problem, found is None, env.local_rank == 0))
    _agree(wanted, [problem for problem, _, _ in told])
    leaders = [rank for rank, (_, lacks, leads) in enumerate(told) if lacks and leads]
    if any(lacks for _, lacks, _ in told):
        say(f"{wanted.repository} is not seen by all nodes: {len(leaders)} of them fetch their own")
        problem = _fetched(wanted, f"{key}/{env.rank}") if env.rank in leaders else ""
        for rank in leaders:
            _wait(f"{key}/{rank}")
        found = _look_up(wanted)
        problem = problem or ("" if found else "the node's first process found it, and this one does not see it")
        _agree(wanted, distributed.gather(problem))
    assert found is not None
    return found


def _agree(wanted: Wanted, problems: Iterable[str]) -> None:
    for problem in problems:
        if problem:
            said = f"{'is not set, and ' if wanted.unset else ''}{wanted.repository} cannot be fetched ({problem})."
            raise StageError(wanted.field, said, wanted.fix)


def _fetched(wanted: Wanted, key: str) -> str:
    """Make sure that the files are here, and tell those who wait for ``key``; returns why not, or an empty string."""
    problem = ""
    try:
        if _look_up(wanted) is None:
            _fetch(wanted)
    except Exception as error:  # the hub's client raises many kinds
        problem = _without_token(f"{type(error).__name__}: {error}".strip().partition("\n")[0])
    _store().set(key, "done")
    return problem


def _fetch(wanted: Wanted) -> None:
    """Ask the hub what there is, and download what is wanted and not here; a broken download is gone on with."""
    from huggingface_hub import HfApi, snapshot_download

    repository, kind = wanted.repository, wanted.kind
    info: Any = HfApi().repo_info(repository, repo_type=kind, files_metadata=True)
    sizes = {item.rfilename: item.size or 0 for item in info.siblings}
    chosen = wanted.choose(sorted(sizes))
    if not chosen:
        raise FileNotFoundError(f"the hub's {kind} {repository} has no usable files")
    say(f"fetching {repository}: {len(chosen)} files, {sum(sizes[name] for name in chosen) / 2**30:.2f} GiB")
    folder = Path(snapshot_download(repository, repo_type=kind, allow_patterns=chosen))
    with suppress(OSError):  # a cache that cannot be written holds what its owner put there
        write_json(wanted.marker, {"commit": folder.name, "files": chosen})


def _look_up(wanted: Wanted) -> Path | None:
    """The folder in the cache if it is whole: by the marker, or offline by what is there."""
    from huggingface_hub import constants

    if wanted.marker.is_file():
        marked = json.loads(wanted.marker.read_text())
        folder: Path = wanted.place / "snapshots" / marked["commit"]
        if all((folder / name).is_file() for name in marked["files"]):
            return folder
    if not constants.HF_HUB_OFFLINE:
        return None
    # not by snapshot_download: it wants every file of the repository, those that nobody chose too
    branch = wanted.place / "refs" / "main"
    if branch.is_file():
        folder = wanted.place / "snapshots" / branch.read_text().strip()
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        if _whole(folder, wanted.choose(names), wanted.label):
            return folder
    return None


def _whole(folder: Path, names: list[str], label: str) -> bool:
    """Whether what someone else put into the cache is all of it, as far as can be told without the hub."""
    if label != "weights" or INDEX not in names:
        return bool(names)
    return set(json.loads((folder / INDEX).read_text())["weight_map"].values()) <= set(names)


def _model_files(names: list[str], weights: bool) -> list[str]:
    beside = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    small = [name for name in beside if name.endswith(SMALL)]
    if not weights:
        return small
    heavy = [name for name in beside if name.endswith(".safetensors")]
    return small + (heavy or [name for name in beside if name.endswith(".bin")])


def _data_files(names: list[str], split: str) -> list[str]:
    data = sorted(name for name in names if name.endswith(DATA))
    of_split = [name for name in data if split in PurePosixPath(name).stem.split("-")[0].split("_")]
    return of_split or [name for name in data if split in name] or data


def _wait(key: str) -> None:
    while not _store().check([key]):
        time.sleep(SECONDS)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _without_token(text: str) -> str:
    token = os.environ.get("HF_TOKEN", "")
    return text.replace(token, "HF_TOKEN") if token else text

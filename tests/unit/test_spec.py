"""RunSpec and run.yaml: what is written down reads back as the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import BYTES_AS_TEXT, NAMES, QUANTIZE, RESOURCES, RUN, STAMP, TEXT, run_spec

from mlmsub.app.config import read_yaml
from mlmsub.core import bundle, paths
from mlmsub.core.errors import UsageError
from mlmsub.core.spec import EnvSetup, Parent, RunSpec, to_bytes, to_text


def written_down(spec: RunSpec, folder: Path) -> RunSpec:
    path = folder / "run.yaml"
    path.write_bytes(bundle.build(spec, RUN, STAMP, RESOURCES, {}).files[paths.SPEC])
    return RunSpec.from_data(read_yaml(path), str(path))


@given(st.binary())
def test_any_file_content_comes_back_byte_for_byte(content: bytes) -> None:
    assert to_bytes(to_text(content)) == content


@given(
    content=st.binary() | TEXT.map(str.encode) | st.sampled_from([b"A=1\r\nB=2\r\n", "\ufeffX=é\u2028\u0085".encode()]),
    overrides=st.dictionaries(NAMES, TEXT),
    args=st.lists(TEXT, min_size=1, max_size=3),
)
def test_a_run_reads_back_from_its_run_yaml(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, overrides: dict[str, str], args: list[str]
) -> None:
    spec = run_spec(
        setup=EnvSetup("/home/é/env.sh", {"env.sh": to_text(content), "lib/x.sh": "Y=no\n"}),
        overrides=overrides,
        profile_env={"A": "007", "B": "no", "C": "~", "D": "", "E": "4:00:00", "F": " x ", "G": "base64:x"},
        args=("m", *args),
        parents=(Parent("20261130-120000-quantize-000000", "/r/x", "afternotok"),),
        origins={"time": "--time"},
    )
    assert written_down(spec, tmp_path_factory.mktemp("spec")) == spec


@given(value=BYTES_AS_TEXT.filter(lambda text: any("\udc80" <= c <= "\udcff" for c in text)))
def test_a_value_that_is_not_utf8_reads_back(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    spec = run_spec(overrides={"A": value})
    assert written_down(spec, tmp_path_factory.mktemp("spec")) == spec


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nods": "2"}, "unknown key 'nods'; did you mean 'nodes'"),
        ({"nodes": "two"}, "nodes: must be a whole number"),
        ({"scheduler": "pbs"}, "scheduler: must be one of slurm, local"),
        ({"setup": "x"}, "setup: expected a mapping"),
    ],
)
def test_a_run_yaml_with_a_mistake(change: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        RunSpec.from_data(QUANTIZE.to_data() | change, "run.yaml")


def test_a_run_yaml_that_lacks_a_key() -> None:
    data = QUANTIZE.to_data()
    del data["image"]
    with pytest.raises(UsageError, match=r"run\.yaml: the key 'image' is missing"):
        RunSpec.from_data(data, "run.yaml")


def test_a_container_sees_its_run_directory_in_one_place() -> None:
    assert QUANTIZE.run_dir_inside(RUN) == "/mlmsub/run"
    assert run_spec(image="").run_dir_inside(RUN) == RUN.dir


def test_tasks_are_counted_over_all_nodes() -> None:
    assert run_spec(nodes=3, tasks_per_node=4).ntasks == 12

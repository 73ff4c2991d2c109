"""`mlmsub doctor` on a real Slurm."""

from __future__ import annotations

import json

from command import Mlmsub


def test_the_lab_is_fit_for_the_profile(mlm: Mlmsub) -> None:
    found = {f["what"]: f for f in json.loads(mlm.run("doctor", "--json").stdout)}
    assert found["Slurm"]["found"].startswith("slurm")
    assert found["partition"]["found"] == "batch: 8 nodes, at most 4:00:00, up"
    assert found["GPUs"]["found"] == "8 h100 a node in batch"
    assert [found[what]["severity"] for what in ("MPI", "Pyxis", "accounting", "scratch", "image")] == ["ok"] * 5
    assert "Traceback" not in mlm.run("doctor").stdout


def test_what_would_keep_jobs_from_running(mlm: Mlmsub) -> None:
    mlm.profile(mpi="pmi9", image="/nowhere.sqsh", gpus_per_node=16, partition="nope")
    done = mlm.run("doctor", check=False)
    assert done.returncode == 3
    for cure in ("set `mpi: pmix`", "set the profile's `image`", "set `partition` to one of batch, interactive"):
        assert cure in done.stdout


def test_writing_fills_the_profile_in(mlm: Mlmsub) -> None:
    path = mlm.home / "config/mlmsub/profiles/open.yaml"
    path.write_text(f"# mine\nscratch: {mlm.scratch}\nimage: {mlm.lab.sqsh}\n")
    mlm.lab.run(["chown", mlm.user, str(path)])
    mlm.run("doctor", "--profile", "open", "--write")
    added = "# found by mlmsub doctor\nmax_nodes: 8\nmax_time: 4:00:00\ngpu_type: h100\n"
    assert path.read_text().endswith(added) and path.read_text().startswith("# mine\n")
    refused = mlm.run(
        "submit", "script", "--profile", "open", "--nodes", "9", "--time", "5:00:00", "--", "x.sh", check=False
    )
    assert refused.returncode == 3
    assert "above the partition's limit of 4:00:00" in refused.stderr and "has 8 nodes, not 9" in refused.stderr

"""One training on other layouts: the losses of a single process, and the same again when it is stopped twice."""

from dataclasses import replace
from pathlib import Path

import pytest
from rig import Result, Runner, in_bf16, make_latent, make_latent_conf
from training_rig import ADAM, Case, in_fp32, iterations, run_pairs, variables, write_data

SHARED = "--use-distributed-optimizer"
DENSE = [
    Case("dp2", {}, f"{ADAM} {SHARED}"),
    Case("dp2-stopped", {}, f"{ADAM} {SHARED}", stops=(3, 5)),
    Case("tp2", {"TP": 2}, f"{ADAM} {SHARED}"),
    Case("tp2-stopped", {"TP": 2}, f"{ADAM} {SHARED}", stops=(3, 5)),
    Case("tp2-sequence-parallel", {"TP": 2}, ADAM, "--sequence-parallel"),
    Case("tp2-chunks", {"TP": 2}, ADAM, chunk=256 * 2 * 7),
    Case("tp2-sequence-parallel-chunks", {"TP": 2}, ADAM, "--sequence-parallel", chunk=256 * 2 * 10),
    Case("pp2-uneven", {"PP": 2}, f"{ADAM} {SHARED}", "--decoder-first-pipeline-num-layers 3"),
]
TAUGHT = [
    Case("taught-tp2-sequence-parallel", {"TP": 2}, ADAM, "--sequence-parallel"),
    Case("taught-pp2", {"PP": 2}, f"{ADAM} {SHARED}"),
]
LATENT = [
    Case("ep2", {"EP": 2}, f"{ADAM} {SHARED}"),
    Case("ep2-stopped", {"EP": 2}, f"{ADAM} {SHARED}", stops=(4,)),
    Case("etp2", {"TP": 2, "ETP": 2}, ADAM),
]


@pytest.fixture(scope="module")
def dense(stage: Runner, source: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("dense")
    runner = Runner(folder / "runs", in_fp32(stage.conf, folder / "model.yaml"))
    alone = runner("finetune", **variables(source, folder / "alone", data))
    settings = folder / "kd.yaml"
    settings.write_text("intermediate_layer_pairs:\n  - [decoder.final_layernorm, decoder.final_layernorm]\n")
    taught = f"--export-kd-teacher-load {folder / 'alone'} --export-kd-cfg {settings}"
    cases = [*DENSE, *(replace(case, extra=f"{case.extra} {taught}") for case in TAUGHT)]
    single = runner("finetune", **variables(source, folder / "taught", data, extra=taught))
    return {"alone": alone, "taught": single, **run_pairs(runner, source, folder, data, cases)}


@pytest.fixture(scope="module")
def latent(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Kimi's architecture."""
    folder = tmp_path_factory.mktemp("latent")
    source = in_bf16(make_latent(folder / "hf"))
    runner = Runner(folder / "runs", in_fp32(make_latent_conf(folder / "conf.yaml"), folder / "model.yaml"))
    given = variables(source, folder / "alone", write_data(folder / "texts.jsonl"))
    return {"alone": runner("finetune", **given), **run_pairs(runner, source, folder, folder / "texts.jsonl", LATENT)}


@pytest.mark.parametrize("name", [case.name for case in DENSE if not case.stops])
def test_dense_layouts_have_the_losses_of_one_process(name: str, dense: dict[str, Result]) -> None:
    assert dense[name].code == 0, dense[name].out
    assert iterations(dense[name]) == pytest.approx(iterations(dense["alone"]), rel=1e-5)
    assert iterations(dense[name], "grad_norm") == pytest.approx(iterations(dense["alone"], "grad_norm"), rel=1e-3)


@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_two_processes_stopped_twice_have_the_same_losses(name: str, dense: dict[str, Result]) -> None:
    stopped = dense[f"{name}-stopped"]
    assert stopped.code == 0, stopped.out
    assert "goes on after iteration 5" in stopped.out
    assert iterations(stopped) == iterations(dense[name])
    assert iterations(stopped, "grad_norm") == iterations(dense[name], "grad_norm")


@pytest.mark.parametrize("name", [case.name for case in TAUGHT])
def test_distillation_has_the_losses_of_one_process(name: str, dense: dict[str, Result]) -> None:
    """The teacher is the student after eight iterations of its own."""
    assert dense[name].code == 0, dense[name].out
    for loss in ("logits_loss", "intermediate_loss", "grad_norm"):
        assert iterations(dense[name], loss) == pytest.approx(iterations(dense["taught"], loss), rel=1e-3), loss


@pytest.mark.parametrize("name", ["ep2", "etp2"])
def test_expert_layouts_have_the_losses_of_one_process(name: str, latent: dict[str, Result]) -> None:
    assert latent[name].code == 0, latent[name].out
    # a near tie may route a token to another expert
    assert iterations(latent[name]) == pytest.approx(iterations(latent["alone"]), rel=1e-4)


def test_split_experts_stopped_have_the_same_losses(latent: dict[str, Result]) -> None:
    assert latent["ep2-stopped"].code == 0, latent["ep2-stopped"].out
    assert iterations(latent["ep2-stopped"]) == iterations(latent["ep2"])

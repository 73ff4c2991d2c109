"""The emblem as a native stage: EAGLE3 on Kimi-K2-Instruct, 8 nodes of 8 GPUs."""

from __future__ import annotations

from test_plan import EAGLE3, KIMI, codes, lab, resolved

from mlmsub.app import plan
from mlmsub.app.config import User

__all__ = ["lab"]


def test_the_emblem_plans_without_errors(lab: User) -> None:
    found = resolved(lab, "eagle3", KIMI, nodes="8", env_setup=EAGLE3)
    assert codes(found, "error") == []
    assert plan.data(plan.make(found))["groups"] == {
        "TP": 8, "CP": 1, "PP": 1, "ETP": 1, "EP": 64, "DP": 8, "EDP": 1,
    }  # fmt: skip
    assert found.spec.native and "MLM_MODEL_SAVE" in found.spec.outputs


def test_pipeline_stages_are_refused_before_the_job(lab: User) -> None:
    found = resolved(lab, "eagle3", KIMI, nodes="8", sets=("PP=16",))
    assert "single-pipeline" in codes(found, "error")


def test_the_draft_exports_in_one_process(lab: User) -> None:
    sets = ("MLM_MODEL_CKPT=/workspace/scratch/e", "MLM_EXTRA_ARGS=--export-extra-modules")
    found = resolved(lab, "export", KIMI, nodes="1", sets=sets)
    assert codes(found, "error") == []
    assert "unknown-argument" not in codes(found, "warning")

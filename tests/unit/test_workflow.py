"""Workflow files: parsing, sweeps, references, order; and planning all steps before anything is sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlmsub.app import workflow as app
from mlmsub.app.config import User
from mlmsub.app.records import Records
from mlmsub.cli.workflow_verbs import tree
from mlmsub.core import workflow
from mlmsub.core.errors import UsageError
from mlmsub.core.workflow import Step, Workflow

ROOT = Path(__file__).resolve().parents[2]
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def parse(steps: Mapping[str, Any], variables: Mapping[str, str] | None = None, **keys: Any) -> Workflow:
    return workflow.parse({"steps": steps, **keys}, "w.yaml", "w", variables or {})


def script(*needs: str, **keys: Any) -> dict[str, Any]:
    return {"stage": "script", "args": ["run.sh"], "needs": list(needs), **keys}


def by_name(found: Workflow) -> dict[str, Step]:
    return {step.name: step for step in found.steps}


def needs(step: Step) -> dict[str, str]:
    return {need.step: need.condition for need in step.needs}


# --- order and needs -----------------------------------------------------------------------------


def test_needs_are_afterok_unless_they_say_otherwise() -> None:
    found = parse({
        "train": script(),
        "clean": script("afterany:train"), "mend": script("afternotok:train"), "go": script("train"),
    })  # fmt: skip
    assert {name: needs(step) for name, step in by_name(found).items()} == {
        "train": {}, "clean": {"train": "afterany"}, "mend": {"train": "afternotok"}, "go": {"train": "afterok"},
    }  # fmt: skip


def test_a_reference_is_a_need_and_does_not_overrule_one() -> None:
    value = "${steps.train.MLM_MODEL_SAVE}"
    found = by_name(parse({
        "a": script(set={"X": value}), "b": script("afterany:train", set={"X": value}), "train": script(),
    }))  # fmt: skip
    assert needs(found["a"]) == {"train": "afterok"}
    assert needs(found["b"]) == {"train": "afterany"}


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    """Steps that need some of those before them, written down in any order."""
    count = draw(st.integers(1, 8))
    made = {f"s{i}": draw(st.lists(st.sampled_from([f"s{j}" for j in range(i)]), unique=True)) if i else []
            for i in range(count)}  # fmt: skip
    return {name: made[name] for name in draw(st.permutations(list(made)))}


@given(graphs())
def test_each_step_comes_after_those_that_it_needs(graph: dict[str, list[str]]) -> None:
    found = parse({name: script(*others) for name, others in graph.items()})
    place = {step.name: index for index, step in enumerate(found.steps)}
    assert set(place) == set(graph)
    assert all(place[other] < place[name] for name, others in graph.items() for other in others)
    assert found == parse({name: script(*others) for name, others in graph.items()}), "the same order each time"
    ancestors = found.ancestors()
    for name, others in graph.items():
        assert ancestors[name] == set(others).union(*(ancestors[other] for other in others))


@given(graphs(), st.data())
def test_any_circle_is_found_and_named(graph: dict[str, list[str]], data: st.DataObject) -> None:
    order = [step.name for step in parse({name: script(*others) for name, others in graph.items()}).steps]
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(order) - 1)] * 2)))
    graph = {name: list(others) for name, others in graph.items()}
    for before, after in zip(order[first:last], order[first + 1 : last + 1], strict=True):
        graph[after].append(before)
    graph[order[first]].append(order[last])
    with pytest.raises(UsageError, match="wait for each other") as caught:
        parse({name: script(*others) for name, others in graph.items()})
    assert " -> " in caught.value.message and caught.value.fix


# --- sweeps --------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True), min_size=1, max_size=3))
def test_a_matrix_has_one_run_for_each_cell(axes: list[list[str]]) -> None:
    matrix = {f"x{index}": values for index, values in enumerate(axes)}
    text = "/".join(f"${{matrix.{axis}}}" for axis in matrix)
    found = parse({"s": script(matrix=matrix, set={"P": text})}).steps
    expected = 1
    for values in axes:
        expected *= len(values)
    assert len({step.name for step in found}) == len(found) == expected
    for step in found:
        assert step.text.set["P"] == "/".join(step.cell.values())
        assert step.name == "-".join(["s", *step.cell.values()])


def test_cells_are_called_by_what_they_are() -> None:
    matrix = {"format": ["FP8_DEFAULT_CFG", "general/ptq/x"], "tp": ["2"]}
    assert [step.name for step in parse({"q": script(matrix=matrix)}).steps] == [
        "q-FP8_DEFAULT_CFG-tp2", "q-general_ptq_x-tp2",
    ]  # fmt: skip


def test_a_named_cell_sets_several_values() -> None:
    matrix = {"f": {"fp8": {"words": "FP8", "flags": ""}, "auto": {"words": "auto", "flags": "--bits ${vars.bits}"}}}
    step = script(matrix=matrix, set={"A": "${matrix.f.words}", "B": "${matrix.f.flags}", "C": "${matrix.f}"})
    found = by_name(parse({"q": step}, vars={"bits": "4.8"}))
    assert found["q-auto"].text.set == {"A": "auto", "B": "--bits 4.8", "C": "auto"}
    assert found["q-fp8"].text.set == {"A": "FP8", "B": "", "C": "fp8"}


def test_a_sweep_after_a_sweep_goes_cell_by_cell_and_a_plain_step_waits_for_all() -> None:
    formats, shots = {"f": ["a", "b"]}, {"f": ["a", "b"], "shots": ["0", "5"]}
    found = by_name(parse({
        "q": script(matrix=formats, set={"OUT": "/x/${matrix.f}"}),
        "score": script(matrix=shots, set={"IN": "${steps.q.OUT}"}),
        "all": script("q"), "one": script(set={"IN": "${steps.q-b.OUT}"}), "only-b": script("q", matrix={"f": ["b"]}),
    }))  # fmt: skip
    assert needs(found["score-a-shots5"]) == {"q-a": "afterok"}
    assert workflow.fill(found["score-b-shots0"], lambda step, name: f"{step}:{name}").set == {"IN": "q-b:OUT"}
    assert list(needs(found["all"])) == ["q-a", "q-b"]
    assert list(needs(found["one"])) == list(needs(found["only-b-b"])) == ["q-b"]


# --- values --------------------------------------------------------------------------------------

PLAIN = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(PLAIN.filter(lambda text: "${" not in text))
def test_other_text_arrives_as_it_is(text: str) -> None:
    (step,) = parse({"s": script(set={"A": text, "B": "<${vars.v}>"})}, vars={"v": text}).steps
    assert workflow.fill(step, lambda *_: "").set == {"A": text, "B": f"<{text}>"}


def test_a_doubled_dollar_is_a_plain_one() -> None:
    (step,) = parse({"s": script(set={"A": "$${HOME} ${vars.v}"})}, vars={"v": "$${x}"}).steps
    assert workflow.fill(step, lambda *_: "").set == {"A": "${HOME} ${x}"}


def test_variables_build_on_each_other_and_can_be_given() -> None:
    steps, said = {"s": script(set={"A": "${vars.out}"})}, {"root": "/a", "out": "${vars.root}/out"}
    assert parse(steps, vars=said).steps[0].text.set == {"A": "/a/out"}
    assert parse(steps, {"root": "/b"}, vars=said).steps[0].text.set == {"A": "/b/out"}


@pytest.mark.parametrize(
    ("steps", "message", "fix"),
    [
        ({}, "w.yaml: steps: there are none", ""),
        ({"a": {"stage": "script", "ndoes": "2"}}, "w.yaml: steps.a: unknown key 'ndoes'; did you mean 'nodes'?", ""),
        ({"a": {"args": ["x"]}}, "w.yaml: steps.a: the key 'stage' is missing", ""),
        ({"a": script("b")}, "w.yaml: steps.a: needs: there is no step 'b'", "name a step"),
        ({"train": script(), "a": script("tarin")}, "there is no step 'tarin'; did you mean 'train'?", ""),
        ({"t": script(), "a": script("afterall:t")}, "'afterall' is no condition; did you mean 'afterany'?", "NAME"),
        ({"a": script(set={"X": "${vars.no}"})}, "w.yaml: steps.a: set.X: ${vars.no} is unknown", "$${"),
        ({"a": script(set={"X": "${HOME}"})}, "steps.a: set.X: ${HOME} is unknown", "for a plain ${ write $${"),
        ({"a": script(set={"X": "${steps.b.Y}"})}, "steps.a: set.X: there is no step 'b'", ""),
        ({"b": script(), "a": script(nodes="${steps.b.Y}")}, "may stand in `set` and `args` only", ""),
        ({"a": script(set={"a-b": "1"})}, "steps.a: set: 'a-b' is not a variable's name", ""),
        ({"a": script(matrix={"f": "x"})}, "steps.a: matrix.f: expected a list of values", ""),
        ({"a": script(matrix={"f": []})}, "steps.a: matrix.f: there are no values", ""),
        ({"a": script(matrix={"f": ["x", "x"]})}, "two runs are called 'a-x'", "rename"),
        ({"a": script(matrix={"f": ["x"]}), "a-x": script()}, "two runs are called 'a-x'", "rename"),
        ({"a b": script()}, "'a b' is no name", "rename"),
        ({"q": script(matrix={"f": ["a", "b"]}), "s": script(set={"X": "${steps.q.OUT}"})},
         "steps.s: set.X: ${steps.q.OUT} could be each of 2 runs of q", "${steps.q-a.OUT}"),
        ({"q": script(matrix={"f": ["a", "b"]}), "s": script("q", matrix={"f": ["c"]})},
         "q has no run for s-c", "the same matrix"),
        ({"a": script("a")}, "wait for each other: a -> a", "take one"),
        ({"t": script(), "a": script("t", "afterany:t")}, "needs: t stands there in two ways", "leave one out"),
        ({"a": script(set={"X": "x\0y"})}, "steps.a: set.X: a NUL byte can stand in no value", "leave it out"),
        ({"a" * 101: script()}, "is no name", "at most 100"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_step_and_field(steps: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(steps)
    assert message in caught.value.message and caught.value.message.startswith("w.yaml: ")
    assert fix in caught.value.fix


def test_a_variable_that_the_file_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"vars: there is no 'modle'; did you mean 'model'\?"):
        parse({"a": script()}, {"modle": "x"}, vars={"model": "y"})


# --- the plan ------------------------------------------------------------------------------------


@pytest.fixture
def lab(user: User, write_profile: Callable[[str, str], Path]) -> User:
    write_profile("lab", "image: /images/m.sqsh\n")
    return user


def plan(user: User, steps: Mapping[str, Any], **keys: Any) -> app.Plan:
    (user.cwd / "w.yaml").write_text(yaml.safe_dump({"steps": steps, **keys}, sort_keys=False))
    return app.plan(user, Records(user.records_dir), "w.yaml")


def native(stage: str, *args: str, **variables: str) -> dict[str, Any]:
    return {"stage": stage, "model": SMOL, "args": list(args), "set": variables}


QUANTIZE = native("quantize", "FP8_DEFAULT_CFG", MLM_MODEL_SAVE="/workspace/scratch/q")
EXPORT = native("export", MLM_MODEL_CKPT="${steps.quantize.MLM_MODEL_SAVE}")


def codes(found: app.Plan) -> list[tuple[str, str]]:
    return [(step, issue.code) for step, issue in found.issues if issue.severity == "error"]


def test_each_step_is_an_ordinary_run_with_the_outputs_of_those_before_it(lab: User) -> None:
    found = plan(lab, {"export": EXPORT, "quantize": QUANTIZE})
    quantize, export = found.steps
    assert codes(found) == []
    assert quantize.resolved.spec.args == (SMOL, "FP8_DEFAULT_CFG")
    assert export.resolved.spec.overrides == {"MLM_MODEL_CKPT": "/workspace/scratch/q"}
    assert export.resolved.spec.job_name == "w-export"
    assert not lab.records_dir.exists(), "planning writes nothing"


def test_a_need_gives_its_checkpoint_as_after_does(lab: User) -> None:
    found = plan(lab, {"quantize": QUANTIZE, "export": {"stage": "export", "model": SMOL, "needs": ["quantize"]}})
    assert codes(found) == []
    assert found.steps[1].resolved.values["MLM_MODEL_CKPT"] == "/workspace/scratch/q"


def test_of_two_checkpoints_one_must_be_named(lab: User) -> None:
    other = native("convert", MLM_MODEL_SAVE="/workspace/scratch/c")
    export = {"stage": "export", "model": SMOL, "needs": ["quantize", "convert"]}
    assert codes(plan(lab, {"quantize": QUANTIZE, "convert": other, "export": export})) == [
        ("export", "workflow-input")
    ]


def test_two_steps_that_write_one_path(lab: User) -> None:
    sweep = native("quantize", "${matrix.f}") | {"matrix": {"f": ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"]}}
    found = plan(lab, {"q": sweep})
    assert codes(found) == [("q-NVFP4_DEFAULT_CFG", "workflow-path")]
    apart = sweep | {"set": {"MLM_WORK_DIR": "/workspace/scratch/${matrix.f}"}}
    assert codes(plan(lab, {"q": apart})) == []


def test_scripts_that_write_one_path_and_one_inside_another(lab: User) -> None:
    train = script(set={"MLM_MODEL_SAVE": "/x/y"})
    assert codes(plan(lab, {"a": train, "b": train})) == [("b", "workflow-path")]
    assert codes(plan(lab, {"a": train, "b": train | {"needs": ["a"]}})) == [], "a later training may go on with it"
    assert codes(plan(lab, {"a": script(set={"MLM_MODEL_SAVE": "/x"}), "b": train})) == [("b", "workflow-path")]


def test_an_empty_word_stays_a_word(lab: User) -> None:
    assert plan(lab, {"a": script(args=["a.sh", "", "x"])}).steps[0].resolved.spec.args == ("a.sh", "", "x")


def test_a_secret_is_no_variable(lab: User) -> None:
    (lab.cwd / "w.yaml").write_text(yaml.safe_dump({
        "vars": {"token": "none"}, "steps": {"a": script(set={"HF_TOKEN": "${vars.token}"})},
    }))  # fmt: skip
    with pytest.raises(UsageError, match="--var token: in a it is HF_TOKEN, a secret") as caught:
        app.plan(lab, Records(lab.records_dir), "w.yaml", variables=["token=hf_much"])
    assert "hf_much" not in caught.value.message + caught.value.fix
    assert app.together(lab, "w.yaml", ["gone=1", "token=a"], ["token=b"]) == ["token=a", "token=b"]


def test_a_step_that_reads_what_is_not_made_yet(lab: User) -> None:
    export = native("export", MLM_MODEL_CKPT="/workspace/scratch/q/")
    assert codes(plan(lab, {"quantize": QUANTIZE, "export": export})) == [("export", "workflow-order")]
    assert codes(plan(lab, {"quantize": QUANTIZE, "export": export | {"needs": ["quantize"]}})) == []


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"quantize": QUANTIZE, "e": native("export", MLM_MODEL_CKPT="${steps.quantize.EXPORT_DIR}")},
         "steps.e: quantize makes no EXPORT_DIR"),
        ({"s": script(set={"OUT": "/x"}), "e": script(set={"IN": "${steps.s.OUTT}"})},
         "s makes no OUTT; did you mean 'OUT'?"),
        ({"q": {"stage": "quantise", "model": SMOL}}, "steps.q: unknown stage 'quantise'; did you mean 'quantize'?"),
        ({"q": native("quantize") | {"nodes": "two"}}, "steps.q: --nodes must be a number"),
        ({"q": native("quantize") | {"env_setup": "no.sh"}}, "no.sh does not exist"),
        ({"s": script(model="x/y")}, "steps.s: model: a script takes none"),
        ({"s": script(set={"HF_TOKEN": "hf_x"}), "e": script(set={"IN": "${steps.s.HF_TOKEN}"})},
         "steps.e: HF_TOKEN is a secret"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_understood(lab: User, steps: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(lab, steps)
    assert message in caught.value.message and str(lab.cwd / "w.yaml") in caught.value.message


def test_the_rules_of_every_step_are_asked(lab: User) -> None:
    wrong = native("quantize", "FP8_DEFAULT_CFG", TP="3", MLM_MODEL_SAVE="/workspace/scratch/w")
    assert {step for step, _ in codes(plan(lab, {"quantize": QUANTIZE, "wrong": wrong}))} == {"wrong"}


def test_a_later_training_knows_the_layout_of_the_one_before(lab: User) -> None:
    first = native("finetune", MLM_MODEL_SAVE="/workspace/scratch/a", TP="1")
    then = native(
        "finetune", MLM_MODEL_SAVE="/workspace/scratch/b", TP="3", MLM_MODEL_CKPT="${steps.first.MLM_MODEL_SAVE}"
    )
    assert ("then", "resume-other-layout") in codes(plan(lab, {"first": first, "then": then}))


def test_content_is_what_a_step_computes_and_not_how_it_queues(lab: User) -> None:
    def content(**keys: Any) -> str:
        return plan(lab, {"quantize": QUANTIZE | keys}).steps[0].content

    assert content() == content() == content(time="1:00:00", account="other", allow=["in-place"])
    assert content() != content(set={"MLM_MODEL_SAVE": "/workspace/scratch/other"})
    (lab.cwd / "env.sh").write_text("TP=1\n")
    before = content(env_setup="env.sh")
    (lab.cwd / "env.sh").write_text("TP=2\n")
    assert content(env_setup="env.sh") != before


@pytest.mark.parametrize("name", app.names())
def test_the_workflows_that_come_along_have_no_errors(lab: User, name: str) -> None:
    found = app.plan(lab, Records(lab.records_dir), name)
    assert codes(found) == []
    assert [issue.code for _, issue in found.issues if issue.severity == "warning"] == []


def test_the_emblem(lab: User) -> None:
    convert, eagle3, export = app.plan(lab, Records(lab.records_dir), "kimi_k2_eagle3").steps
    assert (eagle3.resolved.spec.nodes, export.resolved.spec.nodes) == (8, 2)
    assert eagle3.resolved.values["MLM_MODEL_CKPT"] == convert.record.outputs["MLM_MODEL_SAVE"]
    assert export.resolved.values["PP"] == "16"
    assert "--decoder-first-pipeline-num-layers 3" in export.resolved.values["MLM_EXTRA_ARGS"]


# --- what is shown -------------------------------------------------------------------------------


def test_a_step_hangs_on_the_last_that_it_needs() -> None:
    needs = {"a": [], "b": ["a"], "c": ["a", "b"], "d": ["a"], "e": []}
    assert tree(needs) == [("", "a"), ("├─ ", "b"), ("│  └─ ", "c"), ("└─ ", "d"), ("", "e")]


@given(graphs())
def test_the_tree_has_each_step_once(graph: dict[str, list[str]]) -> None:
    names = [name for _, name in tree(graph)]
    assert sorted(names) == sorted(graph)
    assert all(names.index(others[-1]) < names.index(name) for name, others in graph.items() if others)


def test_plan_exits_3_and_names_the_step(lab: User) -> None:
    wrong = native("quantize", "FP8_DEFAULT_CFG", TP="3", MLM_MODEL_SAVE="/workspace/scratch/w")
    (lab.cwd / "w.yaml").write_text(yaml.safe_dump({"steps": {"right": QUANTIZE, "wrong": wrong}}))
    done = subprocess.run(
        [sys.executable, "-m", "mlmsub.cli.main", "workflow", "plan", "w.yaml"], cwd=lab.cwd, text=True,
        env={**lab.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3
    assert "error: wrong: TP: " in done.stderr and "error: right" not in done.stderr
    assert done.stdout.splitlines()[2].startswith("right") and "nothing was submitted" in done.stdout


def test_no_two_runs_have_one_id(lab: User) -> None:
    found = plan(lab, {"q": native("quantize", MLM_WORK_DIR="/workspace/scratch/${matrix.i}") |
                       {"matrix": {"i": [str(i) for i in range(20)]}}})  # fmt: skip
    assert len({planned.record.run_id for planned in found.steps}) == 20

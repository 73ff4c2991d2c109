"""The catalogue, confs as shell files, and the checks of a conf."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hf_config import FACTS, SOURCES

from mlmsub.app import confs, models, resources
from mlmsub.app.config import read_yaml
from mlmsub.cli import main
from mlmsub.core import confcheck, hf_config, modelconf
from mlmsub.core.errors import UsageError
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.strict import build

# what the reference's confs add for training; all else follows from config.json
TRAINING = {
    "sequence-parallel", "moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-router-bias-update-rate",
    "recompute-activations", "moe-layer-recompute",
}  # fmt: skip
# issue 4 of this project, and Megatron-LM's support matrix and conf folder
ASKED = [*FACTS, "HuggingFaceTB/SmolLM2-135M-Instruct"]


def find(name: str) -> ModelConf:
    conf = models.find(name, Path()).conf
    assert conf is not None
    return conf


# --- the catalogue ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASKED)
def test_every_model_that_was_asked_for_is_there_and_plausible(name: str) -> None:
    assert name in resources.conf_names()
    assert {issue.code for issue in confs.check(name, Path())} <= {"conf-unverified"}
    assert find(name).tokenizer == name, "an Instruct model with its own tokenizer"


@pytest.mark.parametrize("name", FACTS)
def test_the_architecture_is_the_public_configs(name: str) -> None:
    conf, want = find(name), hf_config.convert(FACTS[name], name)
    assert {key: value for key, value in conf.megatron_args.items() if key not in TRAINING} == want.megatron_args
    assert (conf.config, conf.source_format, conf.family) == (want.config, want.source_format, want.family)
    assert conf.checked == SOURCES[name]


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "eagle3"), ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "eagle3"),
        ("deepseek-ai/DeepSeek-R1", "prune"), ("moonshotai/Kimi-K2-Instruct", "prune"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "prune"), ("openai/gpt-oss-20b", "extract"),
        ("nvidia/Nemotron-Mini-4B-Instruct", "convert"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "convert"),
    ],
)  # fmt: skip
def test_a_stage_that_cannot_work_is_named_with_its_reason(model: str, stage: str) -> None:
    assert find(model).unsupported[stage]


def test_gpt_oss_eagle3_is_possible_online_only() -> None:
    conf = find("openai/gpt-oss-120b")
    assert "eagle3" not in conf.unsupported
    assert "online only" in conf.restrictions["eagle3"]


def test_an_alias_finds_the_model() -> None:
    assert models.find("meta-llama/meta-llama-3.1-8b-instruct", Path()).model == "meta-llama/Llama-3.1-8B-Instruct"
    names = [name.lower() for name in resources.conf_names()]
    aliases = [alias.lower() for found in models.catalogue() if found.conf for alias in found.conf.aliases]
    assert len({*names, *aliases}) == len(names) + len(aliases)


def test_the_page_names_every_model() -> None:
    page = (resources.root() / "docs" / "models.md").read_text()
    assert [name for name in resources.conf_names() if f"`{name}`" not in page] == []


# --- YAML ---------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@given(TEXT, st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]*", fullmatch=True), TEXT), st.lists(TEXT, max_size=3))
def test_a_rendered_conf_reads_back_equal(name: str, args: dict[str, str], notes: list[str]) -> None:
    import tempfile

    conf = ModelConf(name, name, args, notes=tuple(notes), config={"beta_fast": "1.0"}, unsupported={"prune": name})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "conf.yaml"
        file.write_text(modelconf.render(conf), encoding="utf-8")
        if args:
            assert build(ModelConf, read_yaml(file), "conf.yaml") == conf


def test_numbers_stay_numbers_for_the_job() -> None:
    """The runtime reads the same file with types: a beta_fast of '1.0' must be a float there, a text a text."""
    import yaml

    conf = ModelConf(
        "m", "m", {"window-size": "127,0", "norm-epsilon": "1.0e-06"}, config={"beta_fast": "1.0", "n": "4"}
    )
    data = yaml.safe_load(modelconf.render(conf))
    assert data["config"] == {"beta_fast": 1.0, "n": 4}
    assert data["megatron_args"] == {"window-size": "127,0", "norm-epsilon": 1e-6}


# --- shell files --------------------------------------------------------------------------

REFERENCE_LIKE = r"""#!/bin/bash

if [ -z ${HF_MODEL_CKPT} ]; then
    HF_MODEL_CKPT=org/Thing
    TOKENIZER_MODEL=org/Thing
else
    TOKENIZER_MODEL=${HF_MODEL_CKPT}
fi

# a remark with "one quote
MODEL_ARGS=" \
    --num-layers 61 \
    \
    --moe-layer-freq [0]*3+[1]*58 \
    --window-size 127,0 \
    --hybrid-layer-pattern M-M*E- \
    --swiglu \
    --trust-remote-code \
"
#    --decoder-first-pipeline-num-layers 6 \
#    --decoder-last-pipeline-num-layers 7 \
"""


def test_a_reference_like_conf_is_read() -> None:
    conf = modelconf.read_shell(REFERENCE_LIKE, "Thing")
    assert conf is not None
    assert conf.megatron_args == {
        "num-layers": "61", "moe-layer-freq": "[0]*3+[1]*58", "window-size": "127,0",
        "hybrid-layer-pattern": "M-M*E-", "swiglu": "true", "trust-remote-code": "true",
    }  # fmt: skip
    assert (conf.model, conf.tokenizer, conf.trust_remote_code, conf.notes) == ("Thing", "org/Thing", True, ())


@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [
        ("TOKENIZER_MODEL='a b'", "a b"),
        ("X=org/x\nTOKENIZER_MODEL=${X}", "org/x"),
        ("export TOKENIZER_MODEL=${Y:-org/y} # why", "org/y"),
        ('if [ -z "${TOKENIZER_MODEL:-}" ]; then\n  TOKENIZER_MODEL=a\nfi', "a"),
        ("if [ -n '' ]; then TOKENIZER_MODEL=a; else TOKENIZER_MODEL=b; fi", "b"),
        (
            'if [ -n "$Z" ]\nthen TOKENIZER_MODEL=a\nelif [ -z $Z ]; then TOKENIZER_MODEL=b\nelse exit\nfi',
            "b",
        ),
        ("if [ -z $Z ]; then if [ -n '' ]; then TOKENIZER_MODEL=a; fi; TOKENIZER_MODEL=b; fi", "b"),
        ("TOKENIZER_MODEL=a\\\nb", "ab"),
        ("# TOKENIZER_MODEL=no \\\nTOKENIZER_MODEL=yes", "yes"),
    ],
)
@pytest.mark.parametrize("arguments", ['MODEL_ARGS="--num-layers 2"', "MODEL_ARGS=(--num-layers 2)"])
def test_the_reader_agrees_with_bash(text: str, tokenizer: str, arguments: str, tmp_path: Path) -> None:
    content = f"{text}\n{arguments}\n"
    conf = modelconf.read_shell(content, "x")
    assert conf is not None
    assert (conf.tokenizer, conf.megatron_args) == (tokenizer, {"num-layers": "2"})
    program = content + 'printf \'%s|%s\' "$TOKENIZER_MODEL" "${MODEL_ARGS[*]}"'
    done = subprocess.run(["bash", "-c", program], env={}, capture_output=True, text=True, timeout=10)
    assert done.stdout == f"{tokenizer}|--num-layers 2"


def test_arguments_can_be_added_to() -> None:
    conf = modelconf.read_shell('MODEL_ARGS="--num-layers 2"\nMODEL_ARGS+=" --swiglu"', "x")
    assert conf is not None and conf.megatron_args == {"num-layers": "2", "swiglu": "true"}


def test_a_conf_that_points_at_another_model_says_so() -> None:
    conf = modelconf.read_shell(
        'HF_MODEL_CKPT=org/small\nTOKENIZER_MODEL=org/other\nMODEL_ARGS="--num-layers 2"', "big"
    )
    assert conf is not None
    assert conf.notes == (
        "its default checkpoint is org/small, its tokenizer org/other", "its default checkpoint is org/small, not big"
    )  # fmt: skip


def test_an_env_setup_is_recognized() -> None:
    with pytest.raises(UsageError, match="an env setup, not a model conf: it sets HF_MODEL_CKPT, TP") as caught:
        models.find("conf/moonshotai/kimi_k2_instruct.sh", resources.root())
    assert "--env-setup" in caught.value.fix


@pytest.mark.parametrize("text", ["exit 1", "TP=8\nsource ./arguments.sh", 'X="no end'])
def test_what_reading_cannot_tell_is_left_to_the_job(text: str) -> None:
    assert modelconf.read_shell(text, "x") is None


def test_a_link_as_a_text_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.sh").write_text('MODEL_ARGS="--num-layers 2"')
    (tmp_path / "link.sh").write_text("real.sh")
    found = models.find("link.sh", tmp_path)
    assert found.conf is not None and found.conf.megatron_args == {"num-layers": "2"}
    assert found.text == 'MODEL_ARGS="--num-layers 2"'
    (tmp_path / "real.sh").unlink()
    with pytest.raises(UsageError, match="symbolic link as a text file"):
        models.find("link.sh", tmp_path)


@given(st.text("\\\"'#$({[;= \n\tifthenA", max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    modelconf.read_shell(f"{text}\nMODEL_ARGS='--num-layers 2'", "x")


# --- the checks ---------------------------------------------------------------------------

GOOD = {"num-layers": "4", "hidden-size": "64", "num-attention-heads": "4", "kv-channels": "16"}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"num-layer": "4"}, "conf-argument"),
        ({"enable-gpt-oss": "true"}, "conf-example-argument"),
        ({"num-query-groups": "3", "group-query-attention": "true"}, "conf-heads"),
        ({"num-query-groups": "2"}, "conf-heads"),
        ({"kv-channels": "1"}, "conf-heads"),
        ({"num-attention-heads": "6", "kv-channels": ""}, "conf-heads"),
        ({"num-experts": "8", "moe-layer-freq": "[0]*1+[1]*2"}, "conf-layers"),
        ({"num-experts": "8", "moe-router-topk": "9"}, "conf-experts"),
        ({"num-experts": "8", "moe-router-num-groups": "3"}, "conf-experts"),
        ({"moe-router-topk": "2"}, "conf-experts"),
        ({"hybrid-layer-pattern": "M-M"}, "conf-layers"),
        ({"hybrid-layer-pattern": "M-EM"}, "conf-experts"),
        ({"hybrid-layer-pattern": "M-XM"}, "conf-layers"),
        ({"num-layers": ""}, "conf-layers"),
        ({"seq-length": "9", "max-position-embeddings": "8"}, "conf-positions"),
        ({"multi-latent-attention": "true"}, "conf-yarn"),
    ],
)
def test_an_implausible_conf_is_told(changed: dict[str, str], code: str) -> None:
    assert not list(confcheck.run(ModelConf("m", "m", GOOD)))
    assert [issue.code for issue in confcheck.run(ModelConf("m", "m", GOOD | changed))] == [code]


def test_a_wrong_name_gets_the_nearest() -> None:
    conf = ModelConf("m", "m", GOOD | {"num-layer": "4"}, unsupported={"eagle": "no"})
    messages = [issue.message for issue in confcheck.run(conf)]
    assert any("did you mean 'num-layers'" in message for message in messages)
    assert any("did you mean 'eagle3'" in message for message in messages)


# --- the command --------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["mlmsub", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_the_list_names_every_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "conf", "list")
    assert code == 0
    assert all(name in out for name in ASKED)
    assert [line.split()[0] for line in out.splitlines() if line.endswith("unverified")] == [
        "nvidia/Nemotron-Mini-4B-Instruct"
    ]
    _, out, _ = run(capsys, monkeypatch, "conf", "list", "--json")
    kimi = next(entry for entry in json.loads(out) if entry["name"] == "moonshotai/Kimi-K2-Instruct")
    assert (kimi["layers"], kimi["experts"], kimi["source_format"], kimi["verified"]) == (61, 384, "fp8_block", True)


def test_show_tells_the_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "conf", "show", "openai/gpt-oss-120b")
    assert code == 0 and "points at the 20b model" in out and "117 B parameters" in out
    _, out, _ = run(capsys, monkeypatch, "conf", "show", "openai/gpt-oss-120b", "--json")
    assert json.loads(out)["restrictions"]["eagle3"].startswith("online only")


def test_check_ends_with_three_on_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("model: m\ntokenizer: m\nmegatron_arg: {}\n")
    code, out, err = run(capsys, monkeypatch, "conf", "check", "bad.yaml", "Qwen/Qwen3-8B")
    assert code == 3 and "bad.yaml: 1 error" in out and "Qwen/Qwen3-8B: ok" in out
    assert "did you mean 'megatron_args'" in err


def test_from_hf_writes_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FACTS["Qwen/Qwen3-8B"]))
    code, out, _ = run(capsys, monkeypatch, "conf", "from-hf", ".", "-o", "mine.yaml", "--name", "me/mine")
    assert code == 0 and "wrote mine.yaml" in out
    assert models.find("mine.yaml", tmp_path).model == "me/mine"

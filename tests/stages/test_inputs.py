"""How variables, argument variables and model confs are read."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import ENOUGH, MODEL, Result, Runner, tensors

from mlmsub.runtime import modelconf
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))
WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@given(st.lists(TEXT))
def test_array_elements_arrive_exactly(tmp_path_factory: pytest.TempPathFactory, elements: list[str]) -> None:
    arrays = tmp_path_factory.mktemp("arrays")
    (arrays / "MLM_EXTRA_ARGS").write_bytes(b"".join(element.encode() + b"\0" for element in elements))
    env = Env({"MLMSUB_ARRAYS": str(arrays), "MLM_EXTRA_ARGS": "not this"})
    assert env.arguments("MLM_EXTRA_ARGS") == elements


@given(st.lists(WORD), st.sampled_from([" ", "\n", "\t ", "  "]))
def test_strings_are_split_on_white_space_alone(words: list[str], blank: str) -> None:
    """No globbing and no quote processing: ``[0]*3+[1]*58`` and ``'a`` stay what they are."""
    assert Env({"MLM_EXTRA_ARGS": blank.join(words)}).arguments("MLM_EXTRA_ARGS") == words


@given(st.integers(min_value=1, max_value=10**6))
def test_integers(number: int) -> None:
    assert Env({"TP": f" {number} "}).integer("TP", 1) == number


@given(st.text().filter(lambda text: text.strip() and not (text.strip().isascii() and text.strip().isdigit())))
def test_what_is_no_integer_is_refused_by_name(text: str) -> None:
    with pytest.raises(StageError, match="TP"):
        Env({"TP": text}).integer("TP", 1)


def test_layout_defaults() -> None:
    assert Env({"TP": "4", "PP": "2", "EP": ""}).layout() == Layout(tp=4, pp=2, etp=4)
    assert Env({"TP": "4", "ETP": "1"}).layout().etp == 1


def test_yaml_values_become_arguments(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.yaml").write_text(
        'model: m\nmegatron_args:\n  num-layers: 2\n  swiglu: true\n  bf16: false\n  moe-layer-freq: "[0]*1+[1]*60"\n'
        "  norm-epsilon: 1.0e-6\n  cp-comm-type: [p2p, a2a]\n"
    )
    conf = modelconf.load(Env({"MLMSUB_RUN_DIR": str(tmp_path)}), "m")
    assert conf.tokenizer == "m"
    assert conf.arguments() == [
        "--num-layers", "2", "--swiglu", "--moe-layer-freq", "[0]*1+[1]*60", "--norm-epsilon", "1e-06",
        "--cp-comm-type", "p2p", "a2a",
    ]  # fmt: skip


def test_a_shell_conf_gives_the_same_checkpoint(
    stage: Runner, fp8_export: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    """MODEL_ARGS as a sourced Megatron-LM conf leaves them, MLM_EXTRA_ARGS as a bash array."""
    run_dir = stage.run_dir()
    words = modelconf.load(Env({"MLMSUB_RUN_DIR": str(run_dir)}), MODEL).arguments()
    (run_dir / "conf" / "model.yaml").unlink()
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "MLM_EXTRA_ARGS").write_bytes(b"".join(word.encode() + b"\0" for word in ENOUGH.split()))
    shell = {"MODEL_ARGS": " \n    ".join(words), "TOKENIZER_MODEL": source, "MLMSUB_ARRAYS": tmp_path / "arrays"}
    quantized = stage(
        "quantize", "fp8", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q",
        **{**shell, "MLM_EXTRA_ARGS": "--not-this"},
    )  # fmt: skip
    assert quantized.code == 0, quantized.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    made, want = tensors(tmp_path / "out"), tensors(folder / "fp8-hf")
    assert all((made[name].float() == want[name].float()).all() for name in want)

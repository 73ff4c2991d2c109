"""Reading an env setup on the submitting side: the real bash, on files with every trait of the real ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mlmsub.app import envfile
from mlmsub.app.envfile import ReadSetup
from mlmsub.core.envsetup import Reading
from mlmsub.core.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a folder"
    made.mkdir()
    return made


def read(folder: Path, content: str | bytes, *, static: bool = False, name: str = "env.sh", **given: str) -> ReadSetup:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return envfile.read(path, given, static=static, time_limit=5.0)


def reading(folder: Path, content: str | bytes, **how: str) -> Reading:
    return read(folder, content, **how).reading


# --- values: one row for each file of research/inputs.md -----------------------------------------

PLAIN = "TP=8\nETP=1\nEP=64\nHF_MODEL_CKPT=/workspace/scratch/m\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(PLAIN, {"TP": "8", "ETP": "1", "EP": "64", "HF_MODEL_CKPT": "/workspace/scratch/m"},
                     id="env_plain"),
        pytest.param("export TP=8\nexport PP=2 CP=1\n", {"TP": "8", "PP": "2", "CP": "1"}, id="env_exported"),
        pytest.param('FOO="a,b c"\nexport T=\ta\n', {"FOO": "a,b c", "T": ""}, id="env_comma_blank"),
        pytest.param("TOK=\"it's \\$HOME \\`id\\`\"\nNL='a\nb'\nexport http_proxy=http://p:1\n",
                     {"TOK": "it's $HOME `id`", "NL": "a\nb", "http_proxy": "http://p:1"}, id="env_quotes_newline"),
        pytest.param("export X='--override {\"n\": 24, \"s\": \"x y\"}'\n",
                     {"X": '--override {"n": 24, "s": "x y"}'}, id="env_json"),
        pytest.param("NCCL_SOCKET_IFNAME=^vlan,lo\nADDITIONAL_SLURM_PARAMS='a=b;c=d'\n",
                     {"NCCL_SOCKET_IFNAME": "^vlan,lo", "ADDITIONAL_SLURM_PARAMS": "a=b;c=d"}, id="env_caret_comma"),
        pytest.param("read -r -d '' TEXT <<'EOF'\nline $X `id`\n  two\nEOF\n",
                     {"TEXT": "line $X `id`\n  two"}, id="env_heredoc"),
        pytest.param("echo hello\nprintf 'value\\0TP\\0''9\\0'\necho >&2 oops\nTP=8\n", {"TP": "8"}, id="env_prints"),
        pytest.param('printf "value\\0TP\\0009\\0" >&1\nTP=8\n', {"TP": "8"}, id="env_prints_fields"),
        pytest.param('MODEL_ARGS=" \\\n    --num-layers 2 \\\n\\\n    --swiglu \\\n\n"\nPP=16\n',
                     {"MODEL_ARGS": "     --num-layers 2     --swiglu \n", "PP": "16"}, id="conf_blank_continuation"),
        pytest.param("FREQ=[0]*3+[1]*58\nARGS=\"--moe-layer-freq $FREQ\"\n",
                     {"FREQ": "[0]*3+[1]*58", "ARGS": "--moe-layer-freq [0]*3+[1]*58"}, id="conf_glob"),
        pytest.param('P="M*M-E*"\nARGS="--hybrid-layer-pattern ${P} ${NOPE:-}"\n',
                     {"P": "M*M-E*", "ARGS": "--hybrid-layer-pattern M*M-E* "}, id="conf_hybrid_pattern"),
        pytest.param('A="x"\n#    --decoder-first-pipeline-num-layers 3 \\\n#  --last 2 \\', {"A": "x"},
                     id="conf_commented_tail"),
        pytest.param("WINDOW='--window-size 127,0'\n", {"WINDOW": "--window-size 127,0"}, id="comma_in_argument"),
        pytest.param(": \"${X:=5}\"\nif [ -z ${Y} ]; then Y=6; fi\n", {"X": "5", "Y": "6"}, id="defaults"),
        pytest.param("A=1 # why\nB='x' # y\n", {"A": "1", "B": "x"}, id="comment_after_quote"),
        pytest.param("for i in 1 2; do V=$i; done\nf() { local Q=3; W=$Q; }\nf\n",
                     {"i": "2", "V": "2", "W": "3"}, id="a_program"),
        pytest.param("declare D=1\ntypeset -x E=2\nreadonly F=3\n", {"D": "1", "E": "2", "F": "3"}, id="declared"),
        pytest.param("X=1\nreturn 0\nX=2\n", {"X": "1"}, id="returns"),
        pytest.param("A='\xe9\u2028'\n", {"A": "é\u2028"}, id="unicode"),
        pytest.param("", {}, id="empty"),
    ],
)  # fmt: skip
def test_values(folder: Path, content: str, expected: dict[str, str]) -> None:
    (folder / "03158").write_text("a file that a glob would find")
    found = reading(folder, content)
    assert found.values == expected
    assert (found.complete, found.unsure, found.arrays) == (True, False, {})


def test_bytes_that_are_not_utf8_survive(folder: Path) -> None:
    assert reading(folder, b"A=\xff\n").values["A"].encode(errors="surrogateescape") == b"\xff"


def test_arrays_keep_their_elements(folder: Path) -> None:
    found = reading(folder, "A=('a b' \"c\nd\" '' [0]*3)\ndeclare -a B=(1)\nB+=(2)\nE=()\nX=1\n")
    assert found.arrays == {"A": ("a b", "c\nd", "", "[0]*3"), "B": ("1", "2"), "E": ()}
    assert found.values == {"X": "1"}
    assert found.text("B") == "1 2"


def test_it_starts_from_what_is_given_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "1")
    found = reading(folder, 'X="${FSW}/m"\nY="${LEAKED-unset}"\nZ="${HOME-unset}"\n', FSW="/lustre")
    assert found.values == {"X": "/lustre/m", "Y": "unset", "Z": "unset"}


def test_a_given_value_that_is_set_again_counts(folder: Path) -> None:
    assert reading(folder, "TP=4\n", TP="2", PP="1").values == {"TP": "4"}


@pytest.mark.parametrize(
    "text",
    ["set -e", "set -eu", "set -o pipefail", "set -f", "shopt -s nullglob", "IFS=,", "cd /", "set -x", "set +a",
     "trap 'echo x' EXIT", "set -C"],
)  # fmt: skip
def test_shell_options_of_the_file_do_not_disturb(folder: Path, text: str) -> None:
    found = reading(folder, f"{text}\nexport X='a b'\nA=('1 2' 3)\n")
    assert found.complete
    assert found.values["X"] == "a b"
    assert found.arrays == {"A": ("1 2", "3")}


@pytest.mark.parametrize(
    "name", ["cd", "srun", "printf", "declare", "echo", "unset", "set", "trap", "export", "read", "compgen", "dirname"]
)
def test_functions_of_the_file_do_not_disturb(folder: Path, name: str) -> None:
    found = reading(folder, f"{name}() {{ :; }}\nX=1\nA=(1 2)\n")
    assert (found.values, found.arrays, found.complete) == ({"X": "1"}, {"A": ("1", "2")}, True)


# --- what is not here --------------------------------------------------------------------------------


def test_a_missing_command_makes_the_values_unsure(folder: Path) -> None:
    found = reading(folder, "GPUS=$(nvidia-smi -L | wc -l)\nTP=8\nnproc\n")
    assert found.unsure
    assert set(found.missing) == {"nvidia-smi", "wc", "nproc"}
    assert found.values["TP"] == "8"


@pytest.mark.parametrize("text", ["source /none/of/this.sh", "X=$(/none/of/this)", "X=$(</none/of/this)"])
def test_a_missing_file_makes_the_values_unsure(folder: Path, text: str) -> None:
    assert reading(folder, f"{text}\nTP=8\n").unsure


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('D=$(dirname "${BASH_SOURCE[0]}")', "."),
        ('D=$(dirname -- "a/b/")', "a"),
        ("D=$(dirname /a)", "/"),
        ("D=$(dirname x)", "."),
        ("D=$(basename /a/b.sh .sh)", "b"),
        ("D=$(basename -- /a/b/)", "b"),
        ("D=$(realpath -m /x/y)", "/x/y"),
    ],
)
def test_path_commands_that_setups_use_are_here(folder: Path, text: str, value: str) -> None:
    found = reading(folder, f"{text}\n")
    assert (found.values["D"], found.unsure) == (value, False)


def test_the_usual_idiom_finds_the_files_own_folder(folder: Path) -> None:
    text = 'HERE=$(cd "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)\nREAL=$(realpath .)\n'
    assert reading(folder, text).values["HERE"] == str(folder)


# --- files that are sourced in turn -----------------------------------------------------------------------


def test_siblings_are_found_and_shipped(folder: Path) -> None:
    (folder / "x.sh").write_text("X=1\n")
    (folder / "lib").mkdir()
    (folder / "lib/y.sh").write_bytes(b"Y=2\n#\xff")
    made = read(folder, 'source ./x.sh\n. "$(dirname "${BASH_SOURCE[0]}")/lib/y.sh"\n')
    assert made.reading.values == {"X": "1", "Y": "2"}
    assert next(iter(made.setup.contents())) == "env.sh"
    assert made.setup.contents()["x.sh"] == b"X=1\n"
    assert made.setup.contents()["lib/y.sh"] == b"Y=2\n#\xff"


def test_a_sibling_is_relative_to_the_file_not_to_the_caller(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "x.sh").write_text("X=right\n")
    (tmp_path / "x.sh").write_text("X=wrong\n")
    (folder / "env.sh").write_text("source ./x.sh\n")
    monkeypatch.chdir(tmp_path)
    assert envfile.read(Path("a folder/env.sh"), {}).reading.values == {"X": "right"}


def test_a_file_from_outside_the_folder_cannot_be_shipped(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("X=1\n")
    with pytest.raises(UsageError, match=r"sources \.\./x\.sh, which lies outside"):
        read(folder, "source ../x.sh\n")


@pytest.mark.parametrize("name", ["setup.sh", "overrides.sh", "merged.sh", "order"])
def test_a_sibling_cannot_have_a_name_of_ours(folder: Path, name: str) -> None:
    (folder / name).write_text("X=1\n")
    with pytest.raises(UsageError, match="a name that mlmsub uses"):
        read(folder, f"source ./{name}\n")


def test_a_setup_may_have_any_name(folder: Path) -> None:
    for name in ("overrides.sh", "a b'c.sh", "-n", "ö.sh", "setup"):
        assert reading(folder, "X=1\n", name=name).values == {"X": "1"}


def test_a_link_is_followed(folder: Path) -> None:
    (folder / "real.sh").write_text("X=1\n")
    (folder / "link.sh").symlink_to("real.sh")
    made = envfile.read(folder / "link.sh", {})
    assert made.reading.values == {"X": "1"}
    assert made.setup.contents() == {"link.sh": b"X=1\n"}


def test_a_link_that_became_a_text_file_is_named(folder: Path) -> None:
    """What a checkout without symbolic links (zip, Windows) leaves."""
    (folder / "real.sh").write_text("X=1\n")
    with pytest.raises(UsageError, match="link"):
        read(folder, "real.sh")


# --- files that cannot be sourced -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param("X=1\n\nexit 1\n", r"ends the shell at \./env\.sh line 3 \(exit code 1\)", id="env_exit1"),
        pytest.param("exit\n", "line 1", id="exit0"),
        pytest.param("set -u\nX=$UNDEFINED\n", r"line 2.*UNDEFINED: unbound variable", id="env_unset_ref"),
        pytest.param("set -e\nX=1\nfalse\nX=2\n", "line 3", id="errexit"),
        pytest.param("f() {\n  exit 3\n}\nf\n", r"line 2 \(exit code 3\)", id="exit_in_function"),
        pytest.param("TP=8\nif true; then\nX=1\n", r"line 4: syntax error", id="syntax"),
        pytest.param("X='a\n", r"line \d: unexpected EOF", id="unclosed_quote"),
        pytest.param("\nX=(1 2\nfi\n", "line ", id="unclosed_array"),
        pytest.param("TP=8\r\nPP=1\r\n", "DOS line ends", id="env_crlf"),
        pytest.param(b"\xef\xbb\xbfTP=8\n", "byte order mark", id="env_bom"),
        pytest.param("exec true\n", "ends the shell", id="exec"),
    ],
)
def test_what_cannot_be_sourced_is_named_by_line(folder: Path, content: str | bytes, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as raised:
        read(folder, content)
    assert str(folder / "env.sh") in raised.value.message
    assert raised.value.fix


@pytest.mark.parametrize(
    "text", ["while :; do :; done", "read -t 60 <> <(:)", "while :; do echo x; done", "( while :; do :; done ) & wait"]
)
def test_an_endless_file_is_ended(folder: Path, text: str) -> None:
    (folder / "env.sh").write_text(f"{text}\n")
    with pytest.raises(UsageError, match="did not end within") as raised:
        envfile.read(folder / "env.sh", {}, time_limit=0.5)
    assert "--static" in raised.value.fix
    assert str(folder) not in working_directories(), "a process was left"


def working_directories() -> list[str]:
    """Where the processes of this machine are, as far as we may know."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.append(str((path / "cwd").readlink()))
    return found


def test_it_does_not_wait_for_input(folder: Path) -> None:
    assert reading(folder, "read -r X\nY=1\n").values["Y"] == "1"


@pytest.mark.parametrize(
    ("name", "complaint"), [("none.sh", "does not exist"), (".", "is a folder"), ("x/y", "does not exist")]
)
def test_a_file_that_is_not_there(folder: Path, name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        envfile.read(folder / name, {})


# --- reading without running -----------------------------------------------------------------------------------


def test_static_reading_runs_nothing(folder: Path) -> None:
    text = f"touch {folder}/ran\nexport TP=8 # why\nA='a b'\nB=$(id)\nC=\"$TP\"\nD=x\\\ny\n: >{folder}/ran\n  E=\n"
    found = reading(folder, text, static=True)
    assert found.values == {"TP": "8", "A": "a b", "D": "xy", "E": ""}
    assert found.unsure
    assert not (folder / "ran").exists()


def test_static_reading_passes_over_what_it_does_not_understand(folder: Path) -> None:
    assert reading(folder, 'X="a\nb"\nexit 1\nif\nY=1\n', static=True).values["Y"] == "1"


@pytest.mark.parametrize("name", ["_BASH"])
def test_without_bash_it_reads_statically(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(envfile, name, "/none/bash")
    found = reading(folder, "TP=8\nN=$(nproc)\n")
    assert (found.values, found.unsure) == ({"TP": "8"}, True)


def test_an_old_bash_reads_statically(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bash"
    old.write_text('#!/bin/sh\n[ "$1" = -n ] || exit 97\n')
    old.chmod(0o755)
    monkeypatch.setattr(envfile, "_BASH", str(old))
    assert reading(folder, "TP=8\n").unsure

"""Profiles and model confs from YAML: strict keys, and none of YAML 1.1's surprises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlmsub.app import config, models, resources
from mlmsub.app.config import User, load_profile
from mlmsub.core import stages
from mlmsub.core.errors import UsageError
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.profile import Profile
from mlmsub.core.strict import build

WriteProfile = Callable[[str, str], Path]


def profile(user: User, write_profile: WriteProfile, text: str) -> Profile:
    write_profile("lab", text)
    return load_profile(user, "lab").profile


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("time: 4:00:00", "time", "4:00:00"),  # 14400 to YAML 1.1
        ("account: no", "account", "no"),  # False
        ("account: 007", "account", "007"),  # 7
        ("partition: 1e3", "partition", "1e3"),
        ("qos: null", "qos", "null"),
        ("constraint: ~", "constraint", "~"),
        ("exclusive: no", "exclusive", False),
        ("exclusive: Off", "exclusive", False),
        ("overcommit: 'yes'", "overcommit", True),
        ("gpus_per_node: 4", "gpus_per_node", 4),
        ("gpus_per_node: 008", "gpus_per_node", 8),
        ("account:", "account", ""),
        ("env:", "env", {}),
        ("env: {TP: 08, on: off}", "env", {"TP": "08", "on": "off"}),
        ("mounts: ['/a:/b', /c]", "mounts", ("/a:/b", "/c")),
        ("mem: 0", "mem", "0"),
    ],
)
def test_the_fields_type_decides_not_yaml(
    user: User, write_profile: WriteProfile, text: str, key: str, value: object
) -> None:
    assert getattr(profile(user, write_profile, text), key) == value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("partion: x", "unknown key 'partion'; did you mean 'partition'?"),
        ("gpus_per_nodes: 8", "did you mean 'gpus_per_node'?"),
        ("zzz: 1", "unknown key 'zzz'"),
        ("gpus_per_node: 8.0", "gpus_per_node: must be a whole number, not '8.0'"),
        ("gpus_per_node: -1", "must be a whole number"),
        ("gpus_per_node: 0", "at least 1"),
        ("gpus_per_node: ٣", "must be a whole number"),
        ("exclusive: maybe", "exclusive: must be true or false, not 'maybe'"),
        ("gpu_request: all", "must be one of gpus-per-node, gres, none"),
        ("mounts: /a:/b", "mounts: expected a list"),
        ("mounts: [[/a]]", r"mounts\[0\]: expected a single value, not a list"),
        ("mounts: ['/a,/b']", "comma"),
        ("account: [a]", "account: expected a single value, not a list"),
        ("env: [A]", "env: expected a mapping, not a list"),
        ("env: {A: {B: c}}", "env.A: expected a single value, not a mapping"),
        ("env: {A-B: c}", "env: 'A-B' is not a variable's name"),
        ("secrets: [a b]", "secrets: 'a b' is not a variable's name"),
        ("pass_env: ['X;id']", "pass_env: 'X;id' is not"),
        ("time: forever", "not a time limit"),
        ("mem: much", "not a memory size"),
        ("runs_root: runs", "runs_root must be an absolute path"),
        ("[a, b]", "expected a mapping of keys, not a list"),
        ("text", "expected a mapping of keys"),
        ("a: b: c", "lab.yaml:1: not YAML: mapping values are not allowed"),
        ("x: 1\ny: [", "lab.yaml:3: not YAML"),
        ("<<: {account: x}", "unknown key '<<'"),
    ],
)
def test_a_profile_with_a_mistake_names_the_file_and_the_mistake(
    user: User, write_profile: WriteProfile, text: str, complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint if "[" in complaint else complaint.replace("?", r"\?")) as raised:
        profile(user, write_profile, text)
    assert "lab.yaml" in raised.value.message


@pytest.mark.parametrize("text", ["", "# nothing said yet\n"])
def test_an_empty_profile_is_the_default_one(user: User, write_profile: WriteProfile, text: str) -> None:
    assert profile(user, write_profile, text) == Profile()


def test_a_key_given_twice_is_an_error(user: User, write_profile: WriteProfile) -> None:
    with pytest.raises(UsageError, match="partition"):
        profile(user, write_profile, "partition: a\naccount: x\npartition: b\n")


@pytest.mark.parametrize("key", ["scratch", "runs_root", "slurm_bin"])
def test_a_tilde_is_refused_since_nothing_expands_it(user: User, write_profile: WriteProfile, key: str) -> None:
    with pytest.raises(UsageError, match="absolute path"):
        profile(user, write_profile, f"{key}: ~/x")


def test_a_file_that_is_not_text_is_an_error(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "").write_bytes(b"account: \xff\n")
    with pytest.raises(UsageError, match=r"lab\.yaml.*not YAML"):
        load_profile(user, "lab")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UsageError, match=r"conf\.yaml: the key 'tokenizer' is missing"):
        build(ModelConf, {"model": "m"}, "conf.yaml")


# --- which profile -----------------------------------------------------------------


def test_the_only_profile_is_taken(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "account: x")
    assert load_profile(user, "").name == "lab"


def test_default_is_taken_among_several(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "account: x")
    write_profile("default", "account: y")
    assert load_profile(user, "").profile.account == "y"


def test_several_profiles_must_be_chosen_from(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "account: x")
    write_profile("prod", "account: y")
    with pytest.raises(UsageError, match="which profile\\? there are lab, prod") as raised:
        load_profile(user, "")
    assert "--profile" in raised.value.fix
    chosen = User({**user.environ, "MLMSUB_PROFILE": "prod"}, user.cwd)
    assert load_profile(chosen, "").name == "prod"
    assert load_profile(chosen, "lab").name == "lab"


def test_without_any_profile_this_machines_slurm_is_meant(user: User) -> None:
    """As with the reference, whose variables then say the rest."""
    found = load_profile(user, "")
    assert (found.name, found.profile, found.source) == ("default", Profile(), "built in")


def test_an_unknown_profile_names_the_nearest(user: User, write_profile: WriteProfile) -> None:
    write_profile("frontier", "account: x")
    with pytest.raises(UsageError, match="there is no profile 'fronteer'; did you mean 'frontier'\\?"):
        load_profile(user, "fronteer")


def test_a_profile_can_be_a_file(user: User) -> None:
    (user.cwd / "here.yaml").write_text("account: x")
    assert load_profile(user, "here.yaml").profile.account == "x"
    with pytest.raises(UsageError, match="there is no profile file"):
        load_profile(user, "there.yaml")


def test_a_relative_xdg_path_is_ignored(user: User) -> None:
    relative = User({**user.environ, "XDG_CONFIG_HOME": "conf"}, user.cwd)
    assert relative.profiles_dir == user.profiles_dir


def test_the_built_in_profile_can_be_replaced(user: User, write_profile: WriteProfile) -> None:
    assert load_profile(user, "local").source == "built in"
    write_profile("local", "scheduler: local\ngpu_request: none\ngpus_per_node: 2")
    assert load_profile(user, "local").profile.gpus_per_node == 2


# --- model confs, stages --------------------------------------------------------------


@pytest.mark.parametrize("name", resources.conf_names())
def test_every_conf_of_the_catalogue_is_valid(name: str, tmp_path: Path) -> None:
    found = models.find(name, tmp_path)
    assert found.model == name
    assert found.conf is not None
    assert set(found.conf.unsupported) <= set(stages.STAGES)


def test_a_model_is_found_whatever_its_case(tmp_path: Path) -> None:
    assert models.find("huggingfacetb/smollm2-135m-instruct", tmp_path).model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_an_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'moonshotai/Kimi-K2-Instruct'"):
        models.find("moonshotai/Kimi-K2-Instuct", tmp_path)


def test_a_shell_conf_is_shipped_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "Mine.sh").write_bytes(b"exit 1\n\xff")
    found = models.find("Mine.sh", tmp_path)
    assert (found.model, found.file_name, found.conf) == ("Mine", "model.sh", None)


@pytest.mark.parametrize("name", ["none.yaml", "sub/none.sh"])
def test_a_conf_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        models.find(name, tmp_path)


def test_an_argument_is_written_without_dashes() -> None:
    with pytest.raises(UsageError, match="--num-layers"):
        build(ModelConf, {"model": "m", "tokenizer": "t", "megatron_args": {"--num-layers": "1"}}, "c.yaml")


def test_an_unknown_stage_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown stage 'quantise'; did you mean 'quantize'\\?") as raised:
        stages.find("quantise")
    assert "export" in raised.value.fix


def test_a_stages_own_table_is_consistent() -> None:
    for name, stage in stages.STAGES.items():
        assert name == stage.name
        assert bool(stage.writes) == bool(stage.suffix)


@pytest.mark.parametrize(
    ("stage", "args", "complaint"),
    [
        ("quantize", (), "quantize needs a model"),
        ("export", ("HuggingFaceTB/SmolLM2-135M-Instruct", "x"), "unexpected argument 'x'"),
        ("script", (), "script needs a command"),
        ("script", ("  ",), "script needs a command"),
    ],
)
def test_arguments_that_a_stage_does_not_take(stage: str, args: tuple[str, ...], complaint: str, user: User) -> None:
    with pytest.raises(UsageError, match=complaint):
        models.conf_of(stages.find(stage), args, user.cwd)


@pytest.mark.parametrize(
    ("args", "words", "model"),
    [
        (("eagle3.sh", "org/m"), ("eagle3.sh", "org/m"), "org/m"),
        (("eagle3.sh org/m",), ("eagle3.sh", "org/m"), "org/m"),  # the reference's one quoted word
        (("a b", "c d"), ("a b", "c d"), "c d"),
        (("run.sh", "--flag"), ("run.sh", "--flag"), ""),
        (("run.sh",), ("run.sh",), ""),
    ],
)
def test_the_command_of_a_script(args: tuple[str, ...], words: tuple[str, ...], model: str, user: User) -> None:
    assert models.conf_of(stages.find("script"), args, user.cwd) == (None, words, model)


def test_profile_names_are_listed_with_the_built_in_one(user: User, write_profile: WriteProfile) -> None:
    write_profile("b", "")
    write_profile("a", "")
    assert config.profile_names(user) == ["a", "b", "local"]

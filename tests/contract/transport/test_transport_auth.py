"""Logging in: agent, keys, passwords, codes, and several of them one after the other."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from password_server import Dialogue, PasswordServer
from sshd_lab import CODE, PASSWORD, Account, Person, Sshd, call, make_key

from mlmsub import transport
from mlmsub.transport.errors import AuthFailed, PromptNeeded

WriteConfig = Callable[..., str]
ANSWERS = {"Verification": CODE, "assword": PASSWORD}


def login(
    config: str, person: Person | None = None, user: str | None = None, kind: str = "paramiko", *, ask: bool = True
) -> bytes:
    """Log in as `person` answers; without one, or with `ask` false, prompting is off."""
    no_prompt = person is None or not ask
    with transport.open("lab", kind, ssh_config=config, user=user, prompter=person, no_prompt=no_prompt) as place:  # type: ignore[arg-type]
        return place.run("echo in").stdout


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
class TestKeys:
    def test_agent_alone(
        self, kind: str, sshd: Sshd, write_config: WriteConfig, agent: Path, user_key: Path, tmp_path: Path
    ) -> None:
        self._add(agent, user_key)
        config = write_config(sshd, f"IdentityAgent {agent}", f"IdentityFile {tmp_path}/none")
        assert login(config.replace(str(user_key), "/nowhere"), kind=kind) == b"in\n"

    def test_agent_from_the_environment(
        self,
        kind: str,
        start_sshd: Callable[..., Sshd],
        write_config: WriteConfig,
        agent: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        key = make_key(tmp_path / "agent_only")
        server = start_sshd(f"agent-{kind}")
        server.allow(key)
        self._add(agent, key)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
        assert login(write_config(server), kind=kind) == b"in\n"

    def test_identities_only_picks_the_named_key_of_a_full_agent(
        self, kind: str, start_sshd: Callable[..., Sshd], write_config: WriteConfig, agent: Path, tmp_path: Path
    ) -> None:
        for number in range(7):  # more than MaxAuthTries
            self._add(agent, make_key(tmp_path / f"other{number}"))
        wanted = make_key(tmp_path / "wanted")
        self._add(agent, wanted)
        wanted.unlink()  # only wanted.pub stays: the agent has the key
        server = start_sshd(f"full-agent-{kind}")
        server.allow(wanted)
        lines = [f"IdentityAgent {agent}", f"IdentityFile {wanted}"]
        assert login(write_config(server, *lines, "IdentitiesOnly yes"), kind=kind) == b"in\n"

    def test_identities_only_leaves_the_other_keys_of_the_agent_alone(
        self, kind: str, start_sshd: Callable[..., Sshd], write_config: WriteConfig, agent: Path, tmp_path: Path
    ) -> None:
        good, named = make_key(tmp_path / "good"), make_key(tmp_path / "named")
        self._add(agent, good)
        server = start_sshd(f"only-{kind}")
        server.allow(good)
        lines = [f"IdentityAgent {agent}", f"IdentityFile {named}"]
        assert login(write_config(server, *lines), kind=kind) == b"in\n"
        with pytest.raises(AuthFailed):
            login(write_config(server, *lines, "IdentitiesOnly yes"), kind=kind)

    @staticmethod
    def _add(agent: Path, key: Path) -> None:
        call("ssh-add", "-q", key, env={**os.environ, "SSH_AUTH_SOCK": str(agent)})

    def test_too_many_keys(
        self, kind: str, start_sshd: Callable[..., Sshd], write_config: WriteConfig, tmp_path: Path
    ) -> None:
        keys = [make_key(tmp_path / f"k{number}") for number in range(7)]
        server = start_sshd(f"many-keys-{kind}")
        server.allow(make_key(tmp_path / "none-of-them"))
        with pytest.raises(AuthFailed) as caught:
            login(write_config(server, *(f"IdentityFile {key}" for key in keys)), kind=kind)
        assert "IdentitiesOnly" in caught.value.fix

    def test_refused_key(
        self, kind: str, start_sshd: Callable[..., Sshd], write_config: WriteConfig, tmp_path: Path
    ) -> None:
        server = start_sshd(f"refused-{kind}")
        server.allow(make_key(tmp_path / "another"))
        with pytest.raises(AuthFailed) as caught:
            login(write_config(server), kind=kind)
        assert caught.value.wanted == ("publickey",)
        if kind == "paramiko":
            assert caught.value.tried == ("publickey ssh-ed25519",)


class TestEncryptedKeys:
    @pytest.fixture
    def lock(self, tmp_path: Path, start_sshd: Callable[..., Sshd], write_config: WriteConfig) -> Callable[..., str]:
        def make(key_type: str = "ed25519") -> str:
            key = make_key(tmp_path / "locked", key_type, "open sesame")
            server = start_sshd(f"locked-{tmp_path.name}")
            server.allow(key)
            return write_config(server, f"IdentityFile {key}", "IdentitiesOnly yes")

        return make

    @pytest.mark.parametrize("key_type", ["ed25519", "ecdsa", "rsa"])
    def test_passphrase_is_asked_once(self, lock: Callable[..., str], key_type: str) -> None:
        person = Person({"passphrase": "open sesame"})
        assert login(lock(key_type), person) == b"in\n"
        assert [secret for _, secret in person.asked] == [True]

    def test_wrong_passphrase(self, lock: Callable[..., str]) -> None:
        with pytest.raises(AuthFailed, match="wrong passphrase"):
            login(lock(), Person({"passphrase": "guess"}))

    def test_without_prompting(self, lock: Callable[..., str]) -> None:
        person = Person({"passphrase": "open sesame"})
        with pytest.raises(PromptNeeded) as caught:
            login(lock(), person, ask=False)
        assert person.asked == []
        assert "passphrase" in caught.value.question
        assert "ssh-add" in caught.value.fix


class TestSshdWithPam:
    """A real sshd: PAM asks for one secret per method, AuthenticationMethods chains them."""

    @pytest.fixture
    def serve(
        self, start_sshd: Callable[..., Sshd], pam_binary: str, account: Callable[[str], Account]
    ) -> Callable[[str], tuple[Sshd, str]]:
        def start(methods: str) -> tuple[Sshd, str]:
            options = (
                "UsePAM yes\nPasswordAuthentication yes\nKbdInteractiveAuthentication yes\n"
                f"AuthenticationMethods {methods}"
            )
            name = methods.replace(",", "-").replace(" ", "_")
            return start_sshd(f"pam-{name}", options=options, binary=pam_binary), account("sh").name

        return start

    def test_password(self, serve: Callable[[str], tuple[Sshd, str]], write_config: WriteConfig) -> None:
        server, user = serve("password")
        person = Person({"password": PASSWORD})
        assert login(write_config(server), person, user) == b"in\n"
        assert person.asked == [(f"{user}@lab:{server.port}'s password: ", True)]

    def test_key_then_code(self, serve: Callable[[str], tuple[Sshd, str]], write_config: WriteConfig) -> None:
        server, user = serve("publickey,keyboard-interactive")
        person = Person({"Password": CODE})
        assert login(write_config(server), person, user) == b"in\n"
        assert len(person.asked) == 1
        assert any("Partial publickey" in line for line in server.attempts())

    def test_password_then_code(self, serve: Callable[[str], tuple[Sshd, str]], write_config: WriteConfig) -> None:
        server, user = serve("password,keyboard-interactive")
        person = Person({"password": PASSWORD, "Password": CODE})
        assert login(write_config(server), person, user) == b"in\n"
        assert len(person.asked) == 2

    def test_wrong_code_is_said_and_not_asked_again(
        self, serve: Callable[[str], tuple[Sshd, str]], write_config: WriteConfig
    ) -> None:
        server, user = serve("keyboard-interactive password")
        person = Person({"Password": "000000", "password": "000000"})
        with pytest.raises(AuthFailed) as caught:
            login(write_config(server), person, user)
        assert len(person.asked) == 1
        assert caught.value.tried == ("keyboard-interactive",)
        assert "keyboard-interactive" in caught.value.wanted

    @pytest.mark.parametrize("kind", ["paramiko", "openssh"])
    def test_without_prompting_nothing_is_guessed(
        self, serve: Callable[[str], tuple[Sshd, str]], write_config: WriteConfig, kind: str
    ) -> None:
        server, user = serve("publickey,keyboard-interactive")
        with pytest.raises(PromptNeeded) as caught:
            login(write_config(server), None, user, kind)
        assert "ssh -fNM" in caught.value.fix

    def test_open_master_connection_is_taken(
        self, serve: Callable[[str], tuple[Sshd, str]], write_config: WriteConfig, room: Path
    ) -> None:
        server, user = serve("publickey,password")
        askpass = room / "askpass"
        askpass.write_text(f"#!/bin/sh\necho '{PASSWORD}'\n")
        askpass.chmod(0o755)
        config = write_config(server, f"ControlPath {room}/%C")
        env = {**os.environ, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
        argv = [shutil.which("ssh") or "ssh", "-F", config, "-l", user, "-NM", "lab"]
        with pytest.raises(PromptNeeded):
            login(config, None, user, "auto")
        master = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)
        try:
            while not list(room.glob("????????????????????????????????????????")):
                assert master.poll() is None
            assert login(config, None, user, "auto") == b"in\n"
        finally:
            master.terminate()
            master.wait()


def test_control_persist_makes_one_login_of_several_runs(
    start_sshd: Callable[..., Sshd], write_config: WriteConfig, room: Path
) -> None:
    server = start_sshd("persist")
    lines = ["ControlMaster auto", f"ControlPath {room}/p-%C", "ControlPersist 60"]
    config = write_config(server, *lines)
    try:
        with transport.open("lab", "openssh", ssh_config=config, no_prompt=True) as place:
            assert [place.run("cat", b"x").stdout for _ in range(3)] == [b"x"] * 3
        assert len([line for line in server.attempts() if line.startswith("Accepted publickey")]) == 1
    finally:
        call("ssh", "-F", config, "-O", "exit", "lab")


class TestDialogues:
    """Against a server of the test's own, which can ask two things at once and again."""

    CODE_PROMPT = ("Verification code: ", True, CODE)
    PASSWORD_PROMPT = ("Password: ", False, PASSWORD)

    @pytest.fixture
    def ask(self, user_key: Path, tmp_path: Path, write_config: WriteConfig) -> Iterator[Callable[..., object]]:
        servers: list[PasswordServer] = []

        def run(person: Person, steps: list[str], rounds: list[list[tuple[str, bool, str]]]) -> list[str]:
            dialogue = Dialogue(steps, rounds, PASSWORD)
            servers.append(PasswordServer(user_key, dialogue))
            with transport.open("lab", "paramiko", ssh_config=write_config(servers[-1]), prompter=person):
                return dialogue.used

        yield run
        for server in servers:
            server.stop()

    def test_two_prompts_in_one_round(self, ask: Callable[..., object]) -> None:
        person = Person(ANSWERS)
        used = ask(person, ["keyboard-interactive"], [[self.PASSWORD_PROMPT, self.CODE_PROMPT]])
        assert used == ["keyboard-interactive"]
        assert [secret for _, secret in person.asked] == [True, False]
        assert "Have your telephone ready" in person.asked[0][0]

    def test_two_rounds_and_one_without_questions(self, ask: Callable[..., object]) -> None:
        person = Person(ANSWERS)
        rounds = [[self.PASSWORD_PROMPT], [self.CODE_PROMPT], []]
        assert ask(person, ["keyboard-interactive"], rounds) == ["keyboard-interactive"]
        assert len(person.asked) == 2

    def test_password_is_sent_to_one_method_only(self, ask: Callable[..., object]) -> None:
        person = Person(ANSWERS)
        both = "password,keyboard-interactive"
        assert ask(person, [both], [[self.PASSWORD_PROMPT]]) == ["keyboard-interactive"]
        assert len(person.asked) == 1

    def test_method_that_asks_nothing_gives_way_to_password(self, ask: Callable[..., object]) -> None:
        person = Person(ANSWERS)
        used = ask(person, ["password,keyboard-interactive"], [])
        assert used == ["keyboard-interactive", "password"]
        assert len(person.asked) == 1

    def test_same_method_twice(self, ask: Callable[..., object]) -> None:
        person = Person(ANSWERS)
        kbd = "keyboard-interactive"
        assert ask(person, ["publickey", kbd, kbd], [[self.CODE_PROMPT]]) == ["publickey", kbd, kbd]

    def test_interrupted_at_the_prompt(self, ask: Callable[..., object]) -> None:
        class Leaves(Person):
            def ask(self, text: str, secret: bool) -> str:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ask(Leaves(), ["keyboard-interactive"], [[self.CODE_PROMPT]])


def test_a_login_that_may_have_been_typed_is_kept_for_the_command(
    start_sshd: Callable[..., Sshd], write_config: WriteConfig
) -> None:
    """ssh itself asks for passwords and codes: several runs of one command are one login, and nothing stays behind."""
    server = start_sshd("typed")
    with transport.open("lab", "openssh", ssh_config=write_config(server)) as place:
        assert [place.run("cat", b"x").stdout for _ in range(3)] == [b"x"] * 3
        folder = Path(place._folder.name)  # type: ignore[attr-defined]
        assert len(list(folder.glob("*"))) == 2  # the configuration, and the master's socket
    assert len([line for line in server.attempts() if line.startswith("Accepted publickey")]) == 1
    assert not folder.exists()

"""What every transport promises, on local, paramiko and openssh against a real sshd."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sshd_lab import Account, Sshd

from mlmsub import transport
from mlmsub.transport.errors import CommandTimeout, ConnectionLost, ScriptNotStarted

KINDS = ("local", "paramiko", "openssh")
Open = Callable[..., transport.Transport]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, transport.Transport]]:
    """One connection for all tests that leave it whole."""
    opened: dict[str, transport.Transport] = {}
    yield opened
    for each in opened.values():
        each.close()


@pytest.fixture
def connect(kind: str, shared: dict[str, transport.Transport], request: pytest.FixtureRequest) -> Iterator[Open]:
    """connect(): the shared transport of this kind; with any argument a new one, closed after the test."""
    own: list[transport.Transport] = []

    def open_(server: Sshd | None = None, user: str | None = None) -> transport.Transport:
        if kind == "local":
            return transport.open(kind="local")
        config = request.getfixturevalue("write_config")(server or request.getfixturevalue("sshd"))
        return transport.open("lab", kind, ssh_config=config, user=user, no_prompt=True)  # type: ignore[arg-type]

    def connect_(*, fresh: bool = False, **options: object) -> transport.Transport:
        if fresh or options:
            own.append(open_(**options))  # type: ignore[arg-type]
            return own[-1]
        if kind not in shared:
            shared[kind] = open_()
        return shared[kind]

    yield connect_
    for each in own:
        each.close()


class TestRun:
    @pytest.mark.parametrize("code", [0, 7, 126, 255])
    def test_exit_code_is_the_scripts_own(self, connect: Open, code: int) -> None:
        assert connect().run(f"exit {code}").exit_code == code

    def test_death_by_signal(self, connect: Open) -> None:
        assert connect().run("exec sh -c 'kill -TERM $$'").exit_code == 128 + 15

    def test_stdout_and_stderr_stay_apart(self, connect: Open) -> None:
        result = connect().run("printf out; printf err >&2")
        assert (result.stdout, result.stderr) == (b"out", b"err")

    def test_several_runs_on_one_transport(self, connect: Open) -> None:
        place = connect()
        assert [place.run(f"echo {n}").stdout for n in range(3)] == [b"0\n", b"1\n", b"2\n"]

    @pytest.mark.parametrize("as_blocks", [False, True])
    def test_ten_megabytes_there_and_back(self, connect: Open, as_blocks: bool) -> None:
        data = bytes(range(256)) * 2 + os.urandom(10 << 20)
        stdin = iter([data[:3], b"", data[3:1000], data[1000:]]) if as_blocks else data
        assert connect().run("cat", stdin).stdout == data

    def test_stdin_is_all_the_scripts(self, connect: Open) -> None:
        result = connect().run("head -c 3; echo; wc -c", b"abc" + b"\0" * 100_000)
        assert result.stdout.split() == [b"abc", b"100000"]

    def test_stdin_that_nobody_reads(self, connect: Open) -> None:
        assert connect().run("exit 3", b"\0" * (4 << 20)).exit_code == 3

    def test_stdin_that_fails_midway(self, connect: Open) -> None:
        def blocks() -> Iterator[bytes]:
            yield b"x" * 100_000
            raise FileNotFoundError("vanished")

        with pytest.raises(FileNotFoundError, match="vanished"):
            connect().run("cat >/dev/null; sleep 600", blocks(), timeout=20)

    def test_awkward_text_in_the_script(self, connect: Open) -> None:
        texts = ["it's", '"', "!", "!!", "$HOME", "`id`", "$(id)", "\\", "\\n", "%s", "#", "größe €", "\t ; & | *", ""]
        script = "".join(f"cat <<'END'\n{text}\nEND\n" for text in texts)
        assert connect().run(script).stdout.decode().split("\n") == [*texts, ""]

    def test_script_longer_than_any_pipe_or_argument(self, connect: Open) -> None:
        script = "".join(f"v{n}='größe {n}'\n" for n in range(20_000)) + 'printf %s "$v19999"; cat'
        assert len(script) > 300_000
        assert connect().run(script, b"!").stdout.decode() == "größe 19999!"

    def test_syntax_error_is_a_result(self, connect: Open) -> None:
        result = connect().run("if then (")
        assert result.exit_code == 2
        assert b"yntax error" in result.stderr

    def test_the_script_is_not_in_the_process_list(self, connect: Open) -> None:
        assert b"seldom-word" not in connect().run("ps -eo args # seldom-word").stdout

    def test_background_process_does_not_hold_up_the_answer(self, connect: Open) -> None:
        result = connect().run("sleep 60 & echo $!", timeout=20)
        os.kill(int(result.stdout), 9)

    def test_timeout(self, connect: Open) -> None:
        with pytest.raises(CommandTimeout) as caught:
            connect().run("printf half >&2; exec sleep 30", timeout=2)
        assert caught.value.stderr == "half"
        assert "may still be running" in caught.value.fix

    def test_nul_in_a_script_is_refused(self, connect: Open) -> None:
        with pytest.raises(ValueError, match="NUL"):
            connect().run("echo \0")


class TestStream:
    def test_output_comes_while_the_script_runs(self, connect: Open, room: Path) -> None:
        gate, got = room / f"gate{time.monotonic_ns()}", []

        def see(data: bytes) -> None:
            got.append(data)
            gate.touch()  # the script goes on only after its first line has arrived here

        code = connect().stream(f"echo one; until [ -e {gate} ]; do sleep 0.02; done; echo two; exit 5", see)
        assert (code, b"".join(got)) == (5, b"one\ntwo\n")

    def test_stderr_has_its_own_way(self, connect: Open) -> None:
        out: list[bytes] = []
        err: list[bytes] = []
        assert connect().stream("echo out; echo err >&2", out.append, err.append) == 0
        assert (b"".join(out), b"".join(err)) == (b"out\n", b"err\n")

    def test_no_process_stays_when_the_reader_leaves(self, connect: Open) -> None:
        pids: list[int] = []

        def leave(data: bytes) -> None:
            pids.append(int(data))
            raise KeyboardInterrupt

        place = connect(fresh=True)
        with pytest.raises(KeyboardInterrupt):
            place.stream("sh -c 'echo $$; exec sleep 300'", leave)
        place.close()
        deadline = time.monotonic() + 10
        while _alive(pids[0]):
            assert time.monotonic() < deadline, "the script is still running"
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh", "fish"])
@pytest.mark.parametrize("kind", ["paramiko", "openssh"], indirect=True)
class TestLoginShells:
    SCRIPT = "x=$(cat); printf '%s|%s' \"$x\" 'a!b$c`d'\"'\"; echo e >&2; exit 9"

    def test_every_login_shell_runs_the_script_alike(
        self, connect: Open, account: Callable[[str], Account], shell: str
    ) -> None:
        result = connect(user=account(shell).name).run(self.SCRIPT, b"in")
        assert (result.exit_code, result.stdout, result.stderr) == (9, b"in|a!b$c`d'", b"e\n")

    def test_noise_of_start_up_files_falls_off(
        self, connect: Open, account: Callable[[str], Account], shell: str
    ) -> None:
        user = account(shell)
        noise = "echo Welcome; echo quota exceeded 1>&2\n"
        files = [".bashrc", ".tcshrc", ".config/fish/config.fish"]
        for name in files:
            (user.home / name).parent.mkdir(parents=True, exist_ok=True)
            (user.home / name).write_text("sh -c 'echo Welcome; echo quota exceeded >&2'\n" if "tc" in name else noise)
        result = connect(user=user.name).run(self.SCRIPT, b"in")
        for name in files:
            (user.home / name).unlink()
        assert (result.exit_code, result.stdout, result.stderr) == (9, b"in|a!b$c`d'", b"e\n")


@pytest.mark.parametrize("kind", ["paramiko", "openssh"], indirect=True)
class TestBroken:
    def test_login_shell_that_runs_nothing(self, connect: Open, account: Callable[[str], Account]) -> None:
        with pytest.raises(ScriptNotStarted) as caught:
            connect(user=account("nologin").name).run("echo")
        assert "not available" in str(caught.value)

    def test_start_up_file_that_eats_stdin(self, connect: Open, account: Callable[[str], Account]) -> None:
        user = account("bash")
        (user.home / ".bashrc").write_text("read -n 5 x\n")
        with pytest.raises(ScriptNotStarted):
            connect(user=user.name).run("echo must not run", b"touch /tmp/must-not-run\n" * 10)
        (user.home / ".bashrc").unlink()

    def test_server_dies_in_the_middle(self, connect: Open, start_sshd: Callable[..., Sshd], room: Path) -> None:
        server = start_sshd(f"dies{time.monotonic_ns()}")
        place, started = connect(server=server), room / f"started{time.monotonic_ns()}"

        def strike() -> None:
            while not started.exists():
                time.sleep(0.01)
            server.kill_sessions()

        threading.Thread(target=strike).start()
        with pytest.raises(ConnectionLost) as caught:
            place.run(f"touch {started}; sleep 5")
        assert "took effect" in caught.value.fix

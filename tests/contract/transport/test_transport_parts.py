"""The pieces that need no server: framing, known_hosts, destinations, configuration, the shipped fake."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlmsub.transport import LocalTransport, ssh_config
from mlmsub.transport.errors import AuthFailed, ConnectFailed
from mlmsub.transport.hostkeys import KnownHosts, append, fingerprint, lookup_name, parse
from mlmsub.transport.openssh import classify
from mlmsub.transport.wire import Frame, make_request

MARKER = b"mlmsub-0123"
unhurried = settings(deadline=None)


@unhurried
@given(noise=st.binary(max_size=50), body=st.binary(max_size=200), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_frame_gives_back_the_body_however_it_is_cut(noise: bytes, body: bytes, sizes: list[int]) -> None:
    stream = noise + MARKER + b"\n" + body + MARKER + b" 17\n" + b"left over"
    frame, got = Frame(MARKER), b""
    while stream:
        size = sizes[len(stream) % len(sizes)]
        got += frame.feed(stream[:size])
        stream = stream[size:]
    assert (got, frame.exit_code, frame.before) == (body, 17, noise)


@unhurried
@given(body=st.binary(max_size=60))
def test_frame_holds_nothing_back_that_cannot_be_the_marker(body: bytes) -> None:
    frame = Frame(MARKER)
    frame.feed(MARKER + b"\n")
    line = body.replace(b"m", b"") + b"\n"
    assert frame.feed(line) == line


@unhurried
@given(body=st.binary(max_size=60))
def test_frame_of_a_stream_that_breaks_off(body: bytes) -> None:
    frame = Frame(MARKER)
    assert frame.feed(MARKER + b"\n" + body) + frame.rest() == body
    assert frame.exit_code is None


# a shell's own limit: it has no NUL, and surrogates are no text
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)


@unhurried
@given(text=WORDS, stdin=st.binary(max_size=100))
def test_any_text_and_any_stdin(text: str, stdin: bytes) -> None:
    # not a here-document: dash 0.5.12 loses a non-ASCII byte where a line begins like the delimiter
    script = f"printf %s {shlex.quote(text)}; cat"
    assert LocalTransport().run(script, stdin).stdout == text.encode() + stdin


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh"])
def test_any_posix_shell_may_be_bin_sh(shell: str) -> None:
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    request = make_request("x=größe; " * 5000 + 'printf "%s" "$x"; cat')
    command = request.command.replace("/bin/sh", shell)
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        input=request.head + b"\0stdin",
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=False,
    )
    frame = Frame(request.marker)
    assert (frame.feed(done.stdout), frame.exit_code) == ("größe".encode() + b"\0stdin", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gate", ("gate", None, None)),
        ("me@gate:2222", ("gate", "me", 2222)),
        ("a@b@gate", ("gate", "a@b", None)),
        ("ssh://me@gate:22/", ("gate", "me", 22)),
        ("[fe80::1]:2222", ("fe80::1", None, 2222)),
        ("fe80::1", ("fe80::1", None, None)),
    ],
)
def test_destinations(text: str, expected: tuple[str, str | None, int | None]) -> None:
    assert ssh_config.parse_destination(text) == expected


@pytest.mark.parametrize("text", ["", "me@", "gate:", "gate:x", "a:b:z"])
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(ValueError, match="not a host"):
        ssh_config.parse_destination(text)


@unhurried
@given(
    name=st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True),
    port=st.integers(1, 65535),
    key=st.binary(min_size=1, max_size=60),
    hashed=st.booleans(),
)
def test_an_entry_that_was_added_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, port: int, key: bytes, hashed: bool
) -> None:
    file = str(tmp_path_factory.mktemp("kh") / "known_hosts")
    append(file, lookup_name(name, port), "ssh-ed25519", key, hashed=hashed)
    known = KnownHosts.for_host(lookup_name(name, port), name, [file], [])
    known.check("ssh-ed25519", key, where="h", accept_new=False, hashed=False)
    assert KnownHosts.for_host(lookup_name(name + "x", port), name + "x", [file], []).entries == ()


@unhurried
@given(st.text())
def test_no_known_hosts_text_is_too_strange(text: str) -> None:
    for entry in parse(text, "file"):
        entry.matches("host")


def test_fingerprint_of_a_known_key() -> None:
    assert fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"


class TestConfigurationWithoutSsh:
    def load(self, tmp_path: Path, text: str, host: str = "lab") -> ssh_config.HostConfig:
        (tmp_path / "config").write_text(text)
        return ssh_config.load(host, ssh_config=str(tmp_path / "config"), ssh="")

    def test_what_is_read(self, tmp_path: Path) -> None:
        text = (
            "Host lab\n HostName login.example\n User me\n Port 2022\n ProxyJump a,b\n IdentitiesOnly yes\n"
            " IdentityFile ~/.ssh/%r\n HostKeyAlias cluster\n UserKnownHostsFile /k1 /k2\n IdentityAgent none\n"
        )
        found = self.load(tmp_path, text)
        assert (found.hostname, found.user, found.port) == ("login.example", "me", 2022)
        assert (found.proxy_jump, found.identities_only, found.host_key_alias) == ("a,b", True, "cluster")
        assert found.identity_files == (str(Path.home() / ".ssh/me"),)
        assert (found.known_hosts, found.identity_agent) == (("/k1", "/k2"), "none")
        assert found.warnings == ()

    def test_same_as_ssh_says(self, tmp_path: Path) -> None:
        text = "Host lab\n HostName login.example\n User me\n IdentityFile /key\n ProxyCommand nc %h %p\n"
        ours = self.load(tmp_path, text)
        theirs = ssh_config.load("lab", ssh_config=str(tmp_path / "config"))
        assert ours == theirs
        assert ours.proxy_command == "nc login.example 22"

    def test_what_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        text = "Include other\nMatch host lab exec true\n HostName wrong\nHost lab\n HostName right\n"
        found = self.load(tmp_path, text)
        assert found.hostname == "right"
        assert [warning.split(": ")[1].split(" is ")[0] for warning in found.warnings] == ["Include", "Match exec"]


@pytest.mark.parametrize(
    ("said", "kind", "part"),
    [
        ("Received disconnect from 1.2.3.4: Too many authentication failures", AuthFailed, "attempts"),
        ("me@h: Permission denied (publickey,gssapi-with-mic).", AuthFailed, "gssapi-with-mic"),
        ("ssh: connect to host h port 22: Connection timed out", ConnectFailed, "timed out"),
        ("", ConnectFailed, "without a message"),
    ],
)
def test_what_ssh_says_becomes_a_typed_error(said: str, kind: type[Exception], part: str) -> None:
    error = classify(said, where="h", no_prompt=False)
    assert isinstance(error, kind)
    assert part in str(error)
    assert error.fix


def test_paramiko_is_imported_only_when_a_connection_by_it_is_opened() -> None:
    code = "import sys, mlmsub.transport; mlmsub.transport.open().run('true'); sys.exit('paramiko' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

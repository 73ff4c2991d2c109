"""Trust: an unknown or changed host key ends everything before the first login attempt."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from sshd_lab import Sshd, call, make_key, public

from mlmsub import transport
from mlmsub.transport.errors import HostKeyChanged, HostKeyUnknown

WriteConfig = Callable[..., str]


@pytest.fixture(params=["paramiko", "openssh"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(kind: str, config: str, *, accept_new: bool = False) -> bytes:
    with transport.open("lab", kind, ssh_config=config, no_prompt=True, accept_new=accept_new) as place:  # type: ignore[arg-type]
        return place.run("echo in").stdout


@pytest.fixture
def quiet_sshd(start_sshd: Callable[..., Sshd], request: pytest.FixtureRequest) -> Sshd:
    """A server that only this test talks to, so that its log can be counted."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return start_sshd(name, host_key_types=("ed25519", "ecdsa"))


def fingerprint(key: Path) -> str:
    return call("ssh-keygen", "-lf", f"{key}.pub").stdout.split()[1]


def test_unknown_host_stops_before_login(kind: str, quiet_sshd: Sshd, write_config: WriteConfig) -> None:
    config = write_config(quiet_sshd, known="")
    with pytest.raises(HostKeyUnknown) as caught:
        run(kind, config)
    assert quiet_sshd.attempts() == []
    assert "--accept-new" in caught.value.fix
    if kind == "paramiko":  # ssh does not show the fingerprint when it may not ask
        assert caught.value.fingerprint == fingerprint(quiet_sshd.host_key())
        assert caught.value.key_type == "ssh-ed25519"


def test_changed_host_key_stops_before_login(
    kind: str, quiet_sshd: Sshd, write_config: WriteConfig, tmp_path: Path
) -> None:
    other = make_key(tmp_path / "other")
    line = f"[127.0.0.1]:{quiet_sshd.port} {public(other)}\n"
    config = write_config(quiet_sshd, known="# comment\n" + line)
    with pytest.raises(HostKeyChanged) as caught:
        run(kind, config, accept_new=True)
    error = caught.value
    assert quiet_sshd.attempts() == []
    assert error.fingerprint == fingerprint(quiet_sshd.host_key())
    assert (error.file, error.line) == (str(tmp_path / "known_hosts"), 2)
    assert "ssh-keygen" in error.fix
    assert "-R" in error.fix
    assert (tmp_path / "known_hosts").read_text() == "# comment\n" + line


def test_the_fix_for_a_changed_key_works(quiet_sshd: Sshd, write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(quiet_sshd, known=f"[127.0.0.1]:{quiet_sshd.port} {public(make_key(tmp_path / 'k'))}\n")
    with pytest.raises(HostKeyChanged) as caught:
        run("paramiko", config)
    command = caught.value.fix[caught.value.fix.index("ssh-keygen") :].partition("   ")[0]
    call("sh", "-c", command)
    assert run("paramiko", config, accept_new=True) == b"in\n"


def test_accept_new_adds_once(kind: str, quiet_sshd: Sshd, write_config: WriteConfig, tmp_path: Path) -> None:
    file = tmp_path / "new" / "known_hosts"
    config = write_config(quiet_sshd, f"UserKnownHostsFile {file}")
    if kind == "openssh":
        file.parent.mkdir()
    assert run(kind, config, accept_new=True) == b"in\n"
    if kind == "paramiko":  # ssh leaves it to the umask
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().split("\n")[0] == quiet_sshd.known_hosts_line().strip()
    before = file.read_text()
    assert run(kind, config, accept_new=True) == b"in\n"
    assert run(kind, config) == b"in\n"
    assert file.read_text() == before


def test_an_added_entry_keeps_the_others(quiet_sshd: Sshd, write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(quiet_sshd, "HashKnownHosts yes", known="elsewhere ssh-ed25519 AAAA")  # no newline at its end
    run("paramiko", config, accept_new=True)
    lines = (tmp_path / "known_hosts").read_text().splitlines()
    assert lines[0] == "elsewhere ssh-ed25519 AAAA"
    assert lines[1].startswith("|1|")
    assert run("openssh", config) == b"in\n"  # OpenSSH reads what we have hashed


def test_hashed_entries(kind: str, sshd: Sshd, write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(sshd)
    call("ssh-keygen", "-H", "-f", tmp_path / "known_hosts")
    assert "127.0.0.1" not in (tmp_path / "known_hosts").read_text()
    assert run(kind, config) == b"in\n"


@pytest.mark.parametrize("pattern", ["[127.0.0.*]:*", "other,[127.0.0.?]:{port}", "127.0.0.1", "[127.0.0.1]:{port}"])
def test_patterns_and_names_without_port(kind: str, sshd: Sshd, write_config: WriteConfig, pattern: str) -> None:
    assert run(kind, write_config(sshd, known=sshd.known_hosts_line(pattern.format(port=sshd.port)))) == b"in\n"


def test_negated_pattern_is_no_entry(kind: str, sshd: Sshd, write_config: WriteConfig) -> None:
    with pytest.raises(HostKeyUnknown):
        run(kind, write_config(sshd, known=sshd.known_hosts_line(f"[127.0.0.*]:*,![127.0.0.1]:{sshd.port}")))


@pytest.mark.parametrize("key_type", ["ed25519", "ecdsa"])
def test_the_known_key_type_is_asked_for(kind: str, sshd: Sshd, write_config: WriteConfig, key_type: str) -> None:
    assert run(kind, write_config(sshd, known=sshd.known_hosts_line(kind=key_type))) == b"in\n"


def test_another_key_type_than_known_is_a_change(quiet_sshd: Sshd, write_config: WriteConfig, tmp_path: Path) -> None:
    rsa = make_key(tmp_path / "rsa", "rsa")
    config = write_config(quiet_sshd, known=f"[127.0.0.1]:{quiet_sshd.port} {public(rsa)}\n")
    with pytest.raises(HostKeyChanged):
        run("paramiko", config, accept_new=True)
    assert quiet_sshd.attempts() == []


def test_host_key_alias(kind: str, sshd: Sshd, write_config: WriteConfig) -> None:
    config = write_config(sshd, "HostKeyAlias the-cluster", known=sshd.known_hosts_line("the-cluster"))
    assert run(kind, config) == b"in\n"


def test_revoked_key(kind: str, quiet_sshd: Sshd, write_config: WriteConfig) -> None:
    known = quiet_sshd.known_hosts_line()
    with pytest.raises(HostKeyChanged) as caught:
        run(kind, write_config(quiet_sshd, known=f"{known}@revoked * {public(quiet_sshd.host_key())}\n"))
    assert "revoked" in str(caught.value)
    assert "-R" not in caught.value.fix
    assert quiet_sshd.attempts() == []


def test_certificate_authority_is_told_as_unsupported(sshd: Sshd, write_config: WriteConfig) -> None:
    known = f"{sshd.known_hosts_line()}@cert-authority * {public(sshd.host_key('ecdsa'))}\n"
    with transport.open("lab", "paramiko", ssh_config=write_config(sshd, known=known)) as place:
        assert "@cert-authority" in " ".join(place.warnings)  # type: ignore[attr-defined]


def test_a_certificate_authority_that_might_have_known_the_host_is_named(sshd: Sshd, write_config: WriteConfig) -> None:
    config = write_config(sshd, known=f"@cert-authority * {public(sshd.host_key('ecdsa'))}\n")
    with pytest.raises(HostKeyUnknown) as caught:
        run("paramiko", config)
    assert "@cert-authority is not supported here" in caught.value.fix

"""Getting in: what is asked, what is refused, and what the message says to do."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import PATH, Lab
from laptop import Laptop, LoginNode, at_terminal
from sshd_lab import CODE, PASSWORD, SSHD

SERVICE = "mlmsub-test-login"
PASSWORD_THEN_CODE = "AuthenticationMethods password,keyboard-interactive:pam"


@pytest.fixture
def strict_node(lab: Lab) -> Iterator[LoginNode]:
    """A login node that wants a password, then a code; PAM takes two fixed words."""
    binary, check, service = lab.directory / SERVICE, lab.directory / "check", Path("/etc/pam.d") / SERVICE
    binary.unlink(missing_ok=True)  # a session of the last server may still run it
    shutil.copy2(SSHD, binary)
    check.write_text(f'#!/bin/sh\nx=$(tr -d "\\0")\n[ "$x" = "{PASSWORD}" ] || [ "$x" = "{CODE}" ]\n')
    check.chmod(0o755)
    service.write_text(
        f"auth required pam_exec.so expose_authtok quiet {check}\nauth required pam_permit.so\n"
        "account required pam_permit.so\nsession required pam_permit.so\n"
    )
    options = [f"SetEnv SLURM_CONF={lab.slurm_conf}", "UsePAM yes", "PasswordAuthentication yes"]
    options += ["KbdInteractiveAuthentication yes", PASSWORD_THEN_CODE, "PermitTTY no"]
    server = LoginNode(lab.directory / "strict-node", options="\n".join(options), binary=str(binary))
    server.start()
    yield server
    server.stop()
    service.unlink()


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
def test_without_key_and_prompt_it_fails_at_once(
    laptop_of: Callable[..., Laptop], strict_node: LoginNode, kind: str
) -> None:
    laptop = laptop_of(strict_node)
    laptop.key = None
    laptop.configure()
    laptop.profile(transport=kind)
    laptop.script("hello.sh", "echo hello\n")
    done = laptop.run("submit", "script", "--no-prompt", "--", "hello.sh", check=False)
    assert done.returncode == 4
    assert "ssh-add" in done.stderr and "without --no-prompt" in done.stderr
    assert not laptop.records()


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
@pytest.mark.parametrize("known", ["unknown", "changed"])
def test_a_host_key_that_is_not_known_stops_before_login(
    laptop: Laptop, login_node: LoginNode, tmp_path: Path, known: str, kind: str
) -> None:
    laptop.profile(transport=kind)
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    line = login_node.known_hosts_line().split()[0] + " " + " ".join(other.with_suffix(".pub").read_text().split()[:2])
    laptop.known_hosts.write_text("" if known == "unknown" else line + "\n")
    laptop.script("hold.sh", "true\n")
    submit = ("submit", "script", "--sbatch-arg=--hold", "--json")
    before = len(login_node.attempts())
    done = laptop.run(*submit, "--", "hold.sh", check=False)
    assert done.returncode == 4 and "nothing was sent" in done.stderr
    assert ("--accept-new" in done.stderr) and ("ssh-keygen" in done.stderr or kind == "openssh")
    if kind == "paramiko":
        assert fingerprint(login_node.host_key().with_suffix(".pub")) in done.stderr
    assert len(login_node.attempts()) == before and not laptop.records()
    accepted = laptop.run(*submit, "--accept-new", "--", "hold.sh", check=False)
    assert accepted.returncode == (0 if known == "unknown" else 4), "a changed key is never accepted"
    assert (login_node.known_hosts_line().split()[2] in laptop.known_hosts.read_text()) == (known == "unknown")
    if known == "unknown":
        laptop.run("cancel", json.loads(accepted.stdout)["run_id"])


def fingerprint(key: Path) -> str:
    shown = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True)
    return shown.stdout.split()[1]


def test_password_and_code_are_asked_once_for_a_whole_command(
    laptop_of: Callable[..., Laptop], strict_node: LoginNode
) -> None:
    """Submit, watch, and ask for the end: three execs over one connection."""
    laptop = laptop_of(strict_node)
    laptop.key = None
    laptop.configure()
    laptop.script("hello.sh", "sleep 1; echo hello from the job\n")
    argv = [laptop.command, "submit", "script", "--watch", "--", "hello.sh"]
    with strict_node.counted() as seen:
        screen = at_terminal(argv, laptop.environment(), [("password", PASSWORD), (":", CODE)])
    assert screen.exit_code == 0, screen.text
    assert "hello from the job" in screen.text
    assert seen[0].logins == 1
    assert screen.count("password:") <= 2 and PASSWORD not in screen.text and CODE not in screen.text
    assert screen.text.lower().count("password: ") == 2, "sshd's PAM calls its code a password too"


def test_nothing_is_asked_where_the_checks_fail(laptop_of: Callable[..., Laptop], strict_node: LoginNode) -> None:
    laptop = laptop_of(strict_node)
    laptop.key = None
    laptop.configure()
    laptop.profile(sandbox="")
    screen = at_terminal([laptop.command, "submit", "script", "--", "hello.sh"], laptop.environment())
    assert screen.exit_code == 2 and "SANDBOX_DIR" in screen.text and "password" not in screen.text.lower()


def test_ctrl_c_at_the_prompt_leaves_the_terminal_as_it_was(
    laptop_of: Callable[..., Laptop], strict_node: LoginNode
) -> None:
    laptop = laptop_of(strict_node)
    laptop.key = None
    laptop.configure()
    laptop.script("hello.sh", "true\n")
    command = f"{laptop.command} submit script -- hello.sh; echo code $?; stty -a"
    screen = at_terminal(["bash", "-c", f"trap : INT; {command}"], laptop.environment(), [("password", "\x03")])
    assert "code 130" in screen.text
    assert " echo " in screen.text and "-echo " not in screen.text


def test_profile_init_asks_connects_and_writes(laptop: Laptop) -> None:
    program = laptop.home / "bin/ssh"  # root's own configuration is left alone
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {laptop.ssh_config} "$@"\n')
    program.chmod(0o755)
    env = laptop.environment() | {"PATH": f"{program.parent}:{PATH}"}
    answers = [
        ("Login node", "cluster"), ("account", "team"), ("partition", "batch"), ("GPUs per node", "4"),
        ("Scratch", str(laptop.scratch)), ("checkout", ""), ("image", str(laptop.lab.sqsh)),
    ]  # fmt: skip
    screen = at_terminal([laptop.command, "profile", "init", "mine"], env, answers)
    assert screen.exit_code == 0, screen.text
    shown = json.loads(laptop.run("profile", "show", "mine", "--json").stdout)
    assert (shown["host"], shown["account"], shown["gpus_per_node"]) == ("cluster", "team", 4)
    assert "could not connect" not in screen.text and "slurm-wlm" in screen.text, screen.text
    again = laptop.run("profile", "init", "mine", check=False)
    assert again.returncode == 2 and "is there already" in again.stderr

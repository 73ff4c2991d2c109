"""Finding the way: jump hosts, ProxyCommand, and hosts that are not there."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sshd_lab import IS_ROOT, Sshd, call

from mlmsub import transport
from mlmsub.transport.errors import ConnectFailed, HostKeyUnknown

KIND = pytest.mark.parametrize("kind", ["paramiko", "openssh"])


def run(kind: str, config: str, script: str = "echo in", **options: object) -> bytes:
    with transport.open("lab", kind, ssh_config=config, no_prompt=True, **options) as place:  # type: ignore[arg-type]
        return place.run(script, b"\0" * 100_000).stdout


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces: `edge` is reachable from here, `inner` only from `edge`."""
    if not IS_ROOT:
        pytest.skip("network namespaces need root")
    tag = f"m{os.getpid() % 100000}"
    edge, inner = f"{tag}e", f"{tag}i"
    try:
        call("ip", "netns", "add", edge)
    except Exception as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        call("ip", "netns", "add", inner)
        call("ip", "link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b", "netns", edge)
        call("ip", "addr", "add", "10.213.77.1/30", "dev", f"{tag}a")
        call("ip", "link", "set", f"{tag}a", "up")
        call("ip", "-n", edge, "addr", "add", "10.213.77.2/30", "dev", f"{tag}b")
        call("ip", "-n", edge, "link", "add", f"{tag}c", "type", "veth", "peer", "name", f"{tag}d", "netns", inner)
        call("ip", "-n", edge, "addr", "add", "10.213.77.5/30", "dev", f"{tag}c")
        call("ip", "-n", inner, "addr", "add", "10.213.77.6/30", "dev", f"{tag}d")
        for space, device in ((edge, "lo"), (edge, f"{tag}b"), (edge, f"{tag}c"), (inner, "lo"), (inner, f"{tag}d")):
            call("ip", "-n", space, "link", "set", device, "up")
        yield edge, inner
    finally:
        call("ip", "netns", "del", edge)
        call("ip", "netns", "del", inner)


class TestJumpHosts:
    @pytest.fixture(scope="class")
    def hosts(
        self, namespaces: tuple[str, str], start_sshd: Callable[..., Sshd], user_key: Path
    ) -> Iterator[tuple[Sshd, Sshd]]:
        edge = start_sshd("edge", address="10.213.77.2", netns=namespaces[0], options="AllowTcpForwarding yes")
        inner = start_sshd("inner", address="10.213.77.6", netns=namespaces[1])
        yield edge, inner
        edge.stop()
        inner.stop()

    @pytest.fixture
    def config(self, hosts: tuple[Sshd, Sshd], user_key: Path, tmp_path: Path) -> Callable[..., str]:
        edge, inner = hosts

        def write(*known: Sshd, jump: str = "gate", more: str = "") -> str:
            known_hosts = tmp_path / "known_hosts"
            known_hosts.write_text("".join(server.known_hosts_line() for server in known))
            file = tmp_path / "config"
            file.write_text(
                f"Host lab\n HostName {inner.address}\n Port {inner.port}\n ProxyJump {jump}\n"
                f"Host gate\n HostName {edge.address}\n Port {edge.port}\n"
                f"Host *\n IdentityFile {user_key}\n UserKnownHostsFile {known_hosts}\n"
                f" GlobalKnownHostsFile none\n ControlPath none\n{more}"
            )
            return str(file)

        return write

    @KIND
    def test_through_the_jump_host(self, kind: str, config: Callable[..., str], hosts: tuple[Sshd, Sshd]) -> None:
        assert run(kind, config(*hosts), "wc -c") == b"100000\n"

    @KIND
    @pytest.mark.parametrize("known", [0, 1])
    def test_each_hop_has_to_be_known(
        self, kind: str, config: Callable[..., str], hosts: tuple[Sshd, Sshd], known: int
    ) -> None:
        with pytest.raises(HostKeyUnknown):
            run(kind, config(hosts[known]))

    @KIND
    def test_accept_new_holds_for_each_hop(self, kind: str, config: Callable[..., str], tmp_path: Path) -> None:
        assert run(kind, config(), accept_new=True) == b"in\n"
        assert len((tmp_path / "known_hosts").read_text().splitlines()) == 2

    @KIND
    def test_chain(self, kind: str, config: Callable[..., str], hosts: tuple[Sshd, Sshd]) -> None:
        edge = hosts[0]
        assert run(kind, config(*hosts, jump=f"gate,{edge.address}:{edge.port}")) == b"in\n"

    @KIND
    def test_inner_host_that_is_not_there(
        self, kind: str, config: Callable[..., str], hosts: tuple[Sshd, Sshd]
    ) -> None:
        with pytest.raises(ConnectFailed):
            run(kind, config(*hosts), port=1)

    def test_circle(self, config: Callable[..., str], hosts: tuple[Sshd, Sshd]) -> None:
        path = config(*hosts, more="")
        text = Path(path).read_text().replace("Host gate\n", "Host gate\n ProxyJump lab\n")
        Path(path).write_text(text)
        with pytest.raises(ConnectFailed, match="circle"):
            run("paramiko", path)


class TestProxyCommand:
    PIPE = (
        "import socket,sys,threading,os\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])))\n"
        "def up():\n  while (d:=os.read(0,65536)): s.sendall(d)\n"
        "threading.Thread(target=up,daemon=True).start()\nwhile (d:=s.recv(65536)): os.write(1,d)\n"
    )

    @KIND
    def test_proxy_command(self, kind: str, sshd: Sshd, write_config: Callable[..., str], tmp_path: Path) -> None:
        pipe = tmp_path / "pipe.py"
        pipe.write_text(self.PIPE)
        config = write_config(sshd, f"ProxyCommand {sys.executable} '{pipe}' %h %p")
        assert run(kind, config, "wc -c") == b"100000\n"

    @KIND
    def test_proxy_command_that_fails(self, kind: str, sshd: Sshd, write_config: Callable[..., str]) -> None:
        with pytest.raises(ConnectFailed):
            run(kind, write_config(sshd, "ProxyCommand false"))


@KIND
class TestNotThere:
    def test_refused(self, kind: str, sshd: Sshd, write_config: Callable[..., str]) -> None:
        with pytest.raises(ConnectFailed) as caught:
            run(kind, write_config(sshd, "Port 1"))
        assert "refused" in str(caught.value)

    def test_unknown_name(self, kind: str, sshd: Sshd, write_config: Callable[..., str]) -> None:
        with pytest.raises(ConnectFailed) as caught:
            run(kind, write_config(sshd, "HostName no-such-host.invalid"))
        assert "VPN" in caught.value.fix

    def test_something_else_listens(self, kind: str, sshd: Sshd, write_config: Callable[..., str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            config = write_config(sshd, f"Port {silent.getsockname()[1]}")
            with pytest.raises(ConnectFailed):
                run(kind, config, connect_timeout=1)

    def test_broken_configuration(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "config").write_text("Host lab\n  NoSuchOption yes\n")
        with pytest.raises(ConnectFailed, match=r"(?i)nosuchoption"):
            run(kind, str(tmp_path / "config"))

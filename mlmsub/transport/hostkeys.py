"""known_hosts: is the key that a host shows the one that was seen before?

Own code because paramiko's HostKeys knows neither wildcard nor negated names, nor markers, nor the line that
an entry stands on. The format is sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlmsub.transport.errors import CHANGED_KEY_FIX, REVOKED_KEY_FIX, UNKNOWN_KEY_FIX, HostKeyChanged, HostKeyUnknown

DEFAULT_PORT = 22
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True)
class Entry:
    """One line of a known_hosts file."""

    marker: str
    names: str
    key_type: str
    key: bytes
    file: str
    line: int

    def matches(self, name: str) -> bool:
        """Whether the line speaks of `name`, a host or `[host]:port` in lower case."""
        if self.names.startswith("|1|"):
            return _hashed_match(self.names, name)
        found = False
        for pattern in self.names.lower().split(","):
            negated = pattern.startswith("!")
            # [ ] are literal in a known_hosts pattern, only * and ? are not
            if fnmatch.fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
                if negated:
                    return False
                found = True
        return found


def _hashed_match(names: str, name: str) -> bool:
    try:
        _, _, salt, digest = names.split("|")
        wanted = base64.b64decode(digest, validate=True)
        return hmac.compare_digest(wanted, _digest(base64.b64decode(salt, validate=True), name))
    except (ValueError, binascii.Error):
        return False


def _digest(salt: bytes, name: str) -> bytes:
    return hmac.new(salt, name.encode(), hashlib.sha1).digest()


def parse(text: str, file: str) -> list[Entry]:
    """The entries of one file; lines that make no sense are passed over, as ssh does."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3:
            continue
        try:
            key = base64.b64decode(fields[2], validate=True)
        except (ValueError, binascii.Error):
            continue
        entries.append(Entry(marker, fields[0], fields[1], key, file, number))
    return entries


def load(files: Iterable[str]) -> list[Entry]:
    """All entries of the files that exist, in order."""
    entries: list[Entry] = []
    for file in files:
        try:
            text = Path(file).read_text("utf-8", "replace")
        except OSError:
            continue
        entries.extend(parse(text, file))
    return entries


def lookup_name(host: str, port: int, alias: str = "") -> str:
    """The name under which ssh keeps a host: HostKeyAlias, else the host, with its port if unusual."""
    if alias:
        return alias.lower()
    return host.lower() if port == DEFAULT_PORT else f"[{host.lower()}]:{port}"


def fingerprint(key: bytes) -> str:
    """SHA256:... as ssh-keygen -l shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class KnownHosts:
    """What the known_hosts files say about one host."""

    name: str
    entries: tuple[Entry, ...]
    files: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def for_host(cls, name: str, bare_name: str, user_files: Sequence[str], more_files: Sequence[str]) -> KnownHosts:
        """`bare_name` is the host without port: as in ssh, its entries count when `name` has none."""
        every = load([*user_files, *more_files])
        found = [e for e in every if e.matches(name)] or [e for e in every if e.matches(bare_name)]
        warnings = tuple(
            f"{e.file}:{e.line}: @cert-authority is not supported here; use the openssh transport"
            for e in found
            if e.marker == "@cert-authority"
        )
        entries = tuple(e for e in found if e.marker != "@cert-authority")
        return cls(name, entries, tuple(user_files), warnings)

    def preferred_algorithms(self, supported: Sequence[str]) -> tuple[str, ...]:
        """`supported` host key algorithms, those of known keys in front.

        A host has several keys and shows the one that is asked for first; asking for a type that
        known_hosts lacks would make an honest host look changed.
        """
        known: set[str] = set()
        for entry in self.entries:
            if entry.marker == "":
                known.update(_RSA_SIGNATURES if entry.key_type == "ssh-rsa" else (entry.key_type,))
        return tuple(sorted(supported, key=lambda algorithm: algorithm not in known))

    def check(self, key_type: str, key: bytes, *, where: str, accept_new: bool, hashed: bool) -> None:
        """Return when the key is known; raises HostKeyUnknown or HostKeyChanged. `accept_new` adds an unknown
        host to the first user file (its name `hashed` or not) and never replaces an entry.
        """
        valid = [e for e in self.entries if e.marker == ""]
        revoked = [e for e in self.entries if e.marker == "@revoked" and e.key == key]
        if not revoked and any(e.key == key for e in valid):
            return
        shown = f"{key_type}, {fingerprint(key)}"
        if revoked or valid:
            entry = [*revoked, *(e for e in valid if e.key_type == key_type), *valid][0]
            remove = shlex.join(["ssh-keygen", "-R", self.name, "-f", entry.file])
            raise HostKeyChanged(
                f"the host shows {'a revoked key' if revoked else 'another key than before'} ({shown}; "
                f"{entry.file}:{entry.line} has {entry.key_type}, {fingerprint(entry.key)}); nothing was sent",
                fix=REVOKED_KEY_FIX if revoked else CHANGED_KEY_FIX.format(remove=remove),
                file=entry.file,
                line=entry.line,
                where=where,
                key_type=key_type,
                fingerprint=fingerprint(key),
            )
        if not accept_new or not self.files:
            raise HostKeyUnknown(
                f"the host key is not known ({shown}); nothing was sent",
                fix="; ".join((UNKNOWN_KEY_FIX, *self.warnings)),
                where=where,
                key_type=key_type,
                fingerprint=fingerprint(key),
            )
        append(self.files[0], self.name, key_type, key, hashed=hashed)


def append(file: str, name: str, key_type: str, key: bytes, *, hashed: bool) -> None:
    """Add one entry, by one write in append mode: a rename could lose another process's entry."""
    if hashed:
        salt = secrets.token_bytes(20)
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(_digest(salt, name)).decode()}"
    path = Path(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{name} {key_type} {base64.b64encode(key).decode()}\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)

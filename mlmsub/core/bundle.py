"""The bundle: what lies in a run directory, as {path: bytes}. A pure function of (RunSpec, run id, submit time)."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlmsub.core import paths, script
from mlmsub.core.quoting import assignment, join, quote
from mlmsub.core.spec import RunSpec, decode, encode

TEMPLATE = "slurm/job.sbatch.j2"
REDACTED = "***"

_MERGED = """\
# For scripts that source SANDBOX_ENV_SETUP again, as Megatron-LM's arguments.sh does: the same files in the same order.
__mlm_env=${BASH_SOURCE[0]%/*} __mlm_back=$PWD
for __mlm_file in $(<"$__mlm_env/order"); do
    builtin cd "$__mlm_env/../${__mlm_file%/*}" || return
    source "./${__mlm_file##*/}"
done
builtin cd "$__mlm_back" || return
"""


@dataclass(frozen=True)
class Bundle:
    """`files` make the run directory; `secrets` go beside them, 0600, named in no manifest."""

    files: dict[str, bytes]
    secrets: dict[str, bytes]
    content_hash: str

    def tar(self) -> bytes:
        """Sorted, without times and owners: same input, same bytes."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, content in sorted({**self.files, **self.secrets}.items()):
                member = tarfile.TarInfo(path)
                member.size = len(content)
                member.mode = self._mode(path)
                archive.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    def _mode(self, path: str) -> int:
        if path in self.secrets:
            return 0o600
        return 0o755 if path.endswith(".sh") or path.startswith("local/") else 0o644


def build(
    spec: RunSpec, run: paths.RunPaths, stamp: str, resources: Mapping[str, bytes], secrets: Mapping[str, str]
) -> Bundle:
    """Put a run directory together.

    `resources` holds mlmsub's own files by path (job template, entrypoint, runtime code, the local stand-ins);
    `secrets` are names and values that must not be readable in any file but the secret one.
    """
    shown, hidden = _redact(spec, secrets)
    files = {
        paths.ENTRYPOINT: resources["container/entrypoint.sh"],
        paths.JOB_SCRIPT: script.render(resources[TEMPLATE].decode(), shown, run, stamp).encode(),
        paths.SPEC: _yaml(shown.to_data()),
        paths.PROFILE_ENV: _assignments(shown.profile_env),
        paths.OVERRIDES: _assignments(shown.overrides),
        paths.DEFAULTS: _defaults(shown.defaults),
        paths.MERGED: _MERGED.encode(),
        paths.COMMAND: _command(shown),
        paths.ORDER: _order(hidden),
        paths.SETUP: b"",
        **{f"env/{name}": content for name, content in _named(shown.setup.contents()).items()},
    }
    if spec.conf_name:
        files[f"conf/{spec.conf_name}"] = decode(spec.conf)
    if spec.native:
        files |= {f"{paths.RUNTIME}/{p}": content for p, content in resources.items() if p.startswith("mlmsub/")}
    if spec.scheduler == "local":
        files |= {p.removeprefix("slurm/"): c for p, c in resources.items() if p.startswith("slurm/local/")}
    files[paths.MANIFEST] = "".join(
        f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in sorted(files.items())
    ).encode()
    return Bundle(files, hidden, content_hash(spec, resources))


def content_hash(spec: RunSpec, resources: Mapping[str, bytes]) -> str:
    """What is submitted, whenever and under whatever id."""
    digest = hashlib.sha256(_yaml(spec.to_data()))
    for path, content in sorted(resources.items()):
        digest.update(path.encode() + b"\0" + content)
    return digest.hexdigest()


def _yaml(data: object) -> bytes:
    import yaml

    # the C dumper where libyaml is there: ten times as fast
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True, width=10_000).encode()


def _assignments(values: Mapping[str, str]) -> bytes:
    return "".join(f"{assignment(name, value)}\n" for name, value in values.items()).encode()


def _defaults(values: Mapping[str, str]) -> bytes:
    """Set what is unset or empty, which is the same to Megatron-LM's scripts."""
    return "".join(f"[[ -n ${{{n}-}} ]] || export {assignment(n, v)}\n" for n, v in values.items()).encode()


def _command(spec: RunSpec) -> bytes:
    if spec.native:
        words = ["-m", "mlmsub.runtime", spec.stage, *spec.args]
    else:
        words = ["bash", *spec.args] if spec.args[0].endswith(".sh") else list(spec.args)
    kind = "stage" if spec.native else "script"
    return f"__mlm_kind={kind} __mlm_install={quote(spec.install)}\n__mlm_command=({join(words)})\n".encode()


def _named(setup: Mapping[str, bytes]) -> dict[str, bytes]:
    """The setup's files as they are called in the bundle: the first is setup.sh, its siblings keep their names."""
    return {"setup.sh" if index == 0 else name: content for index, (name, content) in enumerate(setup.items())}


def _order(hidden: Mapping[str, bytes]) -> bytes:
    """The files of values in the order in which the job sources them, relative to the run directory."""
    secret_setup = f"{paths.SECRETS}/setup.sh"
    candidates = (
        paths.PROFILE_ENV,
        f"{paths.SECRETS}/env.sh",
        secret_setup if secret_setup in hidden else paths.SETUP,
        paths.OVERRIDES,
        f"{paths.SECRETS}/overrides.sh",
    )
    return "".join(f"{path}\n" for path in candidates if path.startswith("env/") or path in hidden).encode()


def _redact(spec: RunSpec, secrets: Mapping[str, str]) -> tuple[RunSpec, dict[str, bytes]]:
    """The spec without secret values, and the secret files that hold them.

    A setup file with a secret in it is shipped whole among the secrets, byte for byte; what stands in its place in
    the bundle is for reading only.
    """
    values = sorted({value for value in secrets.values() if value}, key=len, reverse=True)
    if not values:
        return spec, {}
    hidden = {f"{paths.SECRETS}/env.sh": _assignments(secrets)}

    def clean(text: str) -> str:
        for value in values:
            text = text.replace(value, REDACTED)
        return text

    setup = spec.setup.contents()
    redacted = {name: encode(_replace(content, values)) for name, content in setup.items()}
    if redacted != dict(spec.setup.files):
        hidden |= {f"{paths.SECRETS}/{name}": content for name, content in _named(setup).items()}
    shown = replace(
        spec,
        setup=replace(spec.setup, files=redacted),
        args=tuple(map(clean, spec.args)),
        overrides={n: v for n, v in spec.overrides.items() if clean(v) == v},
        profile_env={n: v for n, v in spec.profile_env.items() if clean(v) == v},
    )
    if overrides := {n: v for n, v in spec.overrides.items() if clean(v) != v}:
        hidden[f"{paths.SECRETS}/overrides.sh"] = _assignments(overrides)
    return shown, hidden


def _replace(content: bytes, values: list[str]) -> bytes:
    for value in values:
        content = content.replace(value.encode(), REDACTED.encode())
    return content

"""The bundle: what lies in a run directory, as {path: bytes}. A pure function of (RunSpec, run id, submit time)."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from mlmsub.core import paths, script
from mlmsub.core.quoting import assignment, join, quote
from mlmsub.core.spec import RunSpec, to_bytes, to_text

TEMPLATE = "slurm/job.sbatch.j2"
REDACTED = "***"

_MERGED = """\
# For scripts that source SANDBOX_ENV_SETUP again, as Megatron-LM's arguments.sh does: the same files in the same order.
__mlm_env=${BASH_SOURCE[0]%/*} __mlm_back=$PWD
__mlm_identity=$(declare -p RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT 2>/dev/null)
for __mlm_file in $(<"$__mlm_env/order"); do
    builtin cd "$__mlm_env/../${__mlm_file%/*}" || return
    source "./${__mlm_file##*/}"
done
builtin cd "$__mlm_back" || return
eval "$__mlm_identity"  # who a rank is stays as it was
"""


@dataclass(frozen=True)
class Bundle:
    """`files` make the run directory; `secrets` go beside them, 0600, named in no manifest."""

    files: dict[str, bytes]
    secrets: dict[str, bytes]
    content_hash: str

    def tar(self, without: Container[str] = ()) -> bytes:
        """Sorted, without times and owners: same input, same bytes. The paths in `without` are left out."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, content in sorted({**self.files, **self.secrets}.items()):
                if path in without:
                    continue
                member = tarfile.TarInfo(path)
                member.size = len(content)
                member.mode = self._mode(path)
                archive.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    def _mode(self, path: str) -> int:
        if path in self.secrets:
            return 0o600
        return 0o755 if path.endswith(".sh") or path.startswith("local/") else 0o644


def in_all(bundles: Sequence[Bundle]) -> Bundle:
    """What is alike in all of them."""
    first, *others = bundles
    files = {p: content for p, content in first.files.items() if all(o.files.get(p) == content for o in others)}
    return Bundle(files, {}, "")


def build(
    spec: RunSpec,
    run: paths.RunPaths,
    stamp: str,
    resources: Mapping[str, bytes],
    secrets: Mapping[str, str],
    record: bytes = b"",
) -> Bundle:
    """Put a run directory together.

    `record` is what another machine needs to find the run. `resources` holds mlmsub's own files by path (job
    template, entrypoint, runtime code, the local stand-ins);
    `secrets` are names and values that must not be readable in any file but the secret one.
    """
    shown, hidden = _redact(spec, secrets)
    files = {
        paths.ENTRYPOINT: resources["container/entrypoint.sh"],
        paths.ATTEMPTS: resources["slurm/attempts.sh"],
        paths.JOB_SCRIPT: to_bytes(script.render(resources[TEMPLATE].decode(), shown, run, stamp)),
        paths.SPEC: _yaml(shown.to_data()),
        paths.PROFILE_ENV: _assignments(shown.profile_env),
        paths.OVERRIDES: _overrides(shown.overrides),
        paths.DEFAULTS: _defaults(shown.defaults),
        paths.MERGED: _MERGED.encode(),
        paths.COMMAND: _command(shown),
        paths.RECORD: record,
        paths.ORDER: _order(hidden),
        paths.SETUP: b"",
        **{f"env/{name}": content for name, content in _named(shown.setup.contents()).items()},
    }
    if spec.conf_name:
        files[f"conf/{spec.conf_name}"] = to_bytes(spec.conf)
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
    return to_bytes("".join(f"{assignment(name, value)}\n" for name, value in values.items()))


def _overrides(values: Mapping[str, str]) -> bytes:
    """Unset first: a plain assignment to a bash array would only change its first element."""
    return to_bytes("".join(f"unset -v {name}; export {assignment(name, value)}\n" for name, value in values.items()))


def _defaults(values: Mapping[str, str]) -> bytes:
    """Set what is unset or empty, which is the same to Megatron-LM's scripts."""
    return to_bytes("".join(f"[[ -n ${{{n}-}} ]] || export {assignment(n, v)}\n" for n, v in values.items()))


def _command(spec: RunSpec) -> bytes:
    if spec.native:
        words = ["-m", "mlmsub.runtime", spec.stage, *spec.args]
    else:
        words = ["bash", *spec.args] if spec.args[0].endswith(".sh") else list(spec.args)
    kind = "stage" if spec.native else "script"
    return to_bytes(f"__mlm_kind={kind} __mlm_install={quote(spec.install)}\n__mlm_command=({join(words)})\n")


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

    A setup that assigns a secret name, or holds a secret's value, is shipped whole among the secrets, byte for byte;
    what stands in its place in the bundle is for reading only.
    """
    values = secret_texts(secrets)
    setup = spec.setup.contents()
    redacted = {name: to_text(_blacken(content, spec.secret_names, values)) for name, content in setup.items()}
    hidden: dict[str, bytes] = {}
    if redacted != dict(spec.setup.files):
        hidden |= {f"{paths.SECRETS}/{name}": content for name, content in _named(setup).items()}

    def is_secret(name: str, value: str) -> bool:
        return name in spec.secret_names or any(text in value for text in values)

    def split(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        secret = {name: value for name, value in variables.items() if is_secret(name, value)}
        return {name: value for name, value in variables.items() if name not in secret}, secret

    profile_env, in_profile = split(spec.profile_env)
    overrides, in_overrides = split(spec.overrides)
    if in_profile or secrets:
        hidden[f"{paths.SECRETS}/env.sh"] = _assignments({**secrets, **in_profile})
    if in_overrides:
        hidden[f"{paths.SECRETS}/overrides.sh"] = _overrides(in_overrides)
    shown = replace(spec, setup=replace(spec.setup, files=redacted), overrides=overrides, profile_env=profile_env)
    return shown, hidden


def secret_texts(secrets: Mapping[str, str]) -> list[str]:
    """The secret values to look for in other texts, longest first; one of a few characters would be found anywhere."""
    return sorted({value for value in secrets.values() if len(value) >= 8}, key=len, reverse=True)


def _blacken(content: bytes, names: tuple[str, ...], values: list[str]) -> bytes:
    """Black out what is assigned to a secret name, and each secret value wherever it stands."""
    for value in values:  # first: one may have several lines
        content = content.replace(to_bytes(value), REDACTED.encode())
    for name in names:
        content = re.sub(rb"(?m)\b(" + name.encode() + rb"=)[^\n]*", rb"\1" + REDACTED.encode(), content)
    return content

"""`mlmsub doctor`."""

from __future__ import annotations

from dataclasses import asdict

from mlmsub.app import config, doctor
from mlmsub.cli import output
from mlmsub.cli.connect import Connections, Trust
from mlmsub.core.errors import ClusterLacks

_STYLES = {"ok": "succeeded", "info": "info", "warning": "warning", "error": "error"}


def run(profile: str, trust: Trust, *, write: bool, as_json: bool) -> None:
    user = config.User.current()
    named = config.load_profile(user, profile)
    with Connections(trust) as connections:
        findings = doctor.examine(user, named, connections.to(named.place))
    if as_json:
        output.print_json([asdict(finding) for finding in findings])
    else:
        print(f"{output.styled(named.name, 'bold')}  {named.profile.host or 'this machine'}")
        rows = [(finding.what, finding.severity, finding.found) for finding in findings]
        output.print_table(("what", "is", "found"), rows, [_STYLES[finding.severity] for finding in findings])
        for finding in findings:
            if finding.fix:
                print(f"  {finding.what}: {finding.fix}")
    if write:
        added = doctor.write(named, findings)
        if not as_json:
            said = ", ".join(f"{key}: {value}" for key, value in added.items())
            print(f"{named.source}: {f'added {said}' if added else 'nothing to add'}")
    if errors := sum(finding.severity == "error" for finding in findings):
        raise ClusterLacks(f"{output.count(errors, 'finding')} would keep jobs from running")

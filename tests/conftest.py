"""How `make test` shares the tests between two processes: by files, and the one cluster is one process's alone."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # xdist's own groups are lost with pytest 9.2, which keeps node ids to itself
        def _split_scope(self, nodeid: str) -> str:
            return "cluster" if "tests/cluster/" in nodeid else nodeid.partition("::")[0]

    return ByFile(config, log)

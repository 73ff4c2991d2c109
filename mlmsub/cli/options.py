"""Options that verbs of several modules take."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print data as JSON.")]
NoPrompt = Annotated[bool, typer.Option("--no-prompt", help="Never ask; fail at once where a question is needed.")]
AcceptNew = Annotated[bool, typer.Option("--accept-new", help="Accept the key of a host that was never met before.")]

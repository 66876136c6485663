"""The commands that read runs: none of them touches one."""

import typer

__all__ = ["app"]

app = typer.Typer()

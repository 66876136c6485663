"""The wheel's description is the README of the package, which hatchling would only take from this folder."""

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    """Adds it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See the module."""
        text = (Path(self.root).parents[1] / "src/ppo_conformance/README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

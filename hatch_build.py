"""Which packages the wheel of `kedge-rl` has: all of them, so that a clone or an address is installed in one go.

A release, which KEDGE_RELEASE=1 marks, leaves the packages that stand alone to their own distributions, made from the
folders in `distributions`, and requires these at its own version (`make wheels`).
"""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ALONE = ("base", "inspect", "tasks")


class Packages(BuildHookInterface):
    """Adds the packages, or the requirements."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See the module."""
        if version != "standard":  # an editable one finds all of src
            return
        if os.environ.get("KEDGE_RELEASE") == "1":
            build_data["dependencies"] += [f"kedge-{name}=={self.metadata.version}" for name in ALONE]
        else:
            build_data["force_include"] |= {f"src/kedge_{name}": f"kedge_{name}" for name in ALONE}

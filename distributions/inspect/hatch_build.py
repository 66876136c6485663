"""Builds the distributions, each from the repository or from its own sdist; each has a copy of this file.

The wheel of `kedge-rl` has all packages of kedge: a clone or an address is installed in one go. A release, which
KEDGE_RELEASE=1 marks, and an sdist leave those that stand alone to their own distributions, made from the folders in
`distributions`, and require these at their own version (`make wheels`). The description is the README, whose links to
files are made absolute.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ALONE = ("base", "inspect", "tasks")
URL = ""
"""Of the repository. Until there is one, links to its files are plain text on PyPI."""

CLONE = "pip install -e .    # in a clone; Python 3.10 or newer", "pip install kedge-rl    # Python 3.10 or newer"
"""The line of the README that is another one on PyPI."""


def home_of(root: Path) -> Path:
    """The folder with `src`: that of a distribution's sdist, or the repository's."""
    return root if (root / "src").is_dir() else root.parents[1]


def absolute_links(text: str, page: str, url: str) -> str:
    """The README of a folder as PyPI shows it: links to files lead to the repository, or are plain text without one."""

    def link(found: re.Match[str]) -> str:
        bang, shown, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        if not url:
            return "" if bang else shown
        path = os.path.normpath(Path(page).parent / target.partition("#")[0]).replace(os.sep, "/")
        return f"{bang}[{shown}]({url}/{'raw' if bang else 'blob'}/main/{path}{''.join(target.partition('#')[1:])})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


class Description(MetadataHookInterface):
    """Adds the description, and addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See the module."""
        package = metadata["name"].replace("-", "_")
        page = "README.md" if package == "kedge_rl" else f"src/{package}/README.md"
        text = (home_of(Path(self.root)) / page).read_text("utf-8").replace(*CLONE)
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, page, URL)}
        metadata["urls"] = {"Repository": URL, "Changelog": f"{URL}/blob/main/CHANGELOG.md"} if URL else {}


class Packages(BuildHookInterface):
    """Adds the packages, or the requirements."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See the module."""
        root, name = Path(self.root), self.metadata.name
        sources = home_of(root) / "src"
        if name != "kedge-rl" and sources.parent != root:  # hatchling finds the package of an sdist
            package = name.replace("-", "_")
            build_data["force_include"][str(sources / package)] = f"{'src/' * (self.target_name == 'sdist')}{package}"
        elif (
            name == "kedge-rl" and self.target_name == "wheel" and version == "standard"
        ):  # an editable one finds all of src
            if os.environ.get("KEDGE_RELEASE") == "1" or (root / "PKG-INFO").is_file():
                build_data["dependencies"] += [f"kedge-{each}=={self.metadata.version}" for each in ALONE]
            else:
                build_data["force_include"] |= {str(sources / f"kedge_{each}"): f"kedge_{each}" for each in ALONE}

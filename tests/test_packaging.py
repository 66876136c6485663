"""The package declares every import as a dependency; none is only available through another package."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge_base import errors
from kedge_base.errors import install_line
from kedge_base.packages import PACKAGES
from kedge_base.version import DISTRIBUTION, __version__

ROOT = Path(__file__).resolve().parent.parent


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_declared() -> None:
    # The plugin of vLLM runs in the server's environment, where kedge is not installed.
    elsewhere = ("rollout/vllm/plugin", "/ppo_conformance/")  # the suite is no part of kedge-rl
    paths = [path for path in (ROOT / "src").rglob("*.py") if not any(part in path.as_posix() for part in elsewhere)]
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    foreign = {name for tree in trees for name in imported(tree)} - sys.stdlib_module_names - PACKAGES
    foreign -= {"IPython"}  # only imported in a notebook, which has it
    assert len(foreign) > 10
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [block] = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    lines = re.findall(r'^[\w-]+ = \[(".*")\]$', project, re.MULTILINE)  # the extras that fit on a line
    extras = [name for line in lines for name in re.findall(r'"([\w-]+)[<>=]', line)]
    declared = {normalized(name) for name in [*re.findall(r'^  "([\w.-]+)', block, re.MULTILINE), *extras]}
    homes = packages_distributions()
    assert {name for name in foreign if not declared & {normalized(home) for home in homes.get(name, [name])}} == set()


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ('{"url": "file:///clones/code", "dir_info": {"editable": true}}', "pip install -e '.[wandb]'"),
        (None, "pip install 'kedge-rl[wandb]'"),
        (
            '{"url": "https://example.org/kedge", "vcs_info": {"vcs": "git", "commit_id": "ab"}}',
            "pip install 'kedge-rl[wandb] @ git+https://example.org/kedge'",
        ),
        ('{"url": "file:///tmp/k.whl", "archive_info": {}}', "pip install 'kedge-rl[wandb] @ file:///tmp/k.whl'"),
    ],
)
def test_the_line_that_installs_an_extra_is_true_where_it_is_shown(
    origin: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`direct_url.json` (PEP 610) says where pip took a package from; one from an index has none."""
    monkeypatch.setattr(errors, "distribution", lambda name: SimpleNamespace(read_text=lambda file: origin))
    assert install_line("wandb") == line


def test_without_a_distribution_the_source_is_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(errors, "distribution", missing)
    assert install_line("wandb") == "pip install -e '.[wandb]'"


def texts() -> Iterator[tuple[Path, str]]:
    places = [ROOT / name for name in ("src", "docs", "bench", "handbook", "tests", ".ci")]
    files: list[Path] = []
    for place in places:
        for folder, folders, names in os.walk(place):
            # Such as the environments that `make bench-peers` makes.
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
            files += [
                path for name in sorted(names) if (path := Path(folder, name)).suffix in (".py", ".md", ".js", "")
            ]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        if path.is_file() and path != Path(__file__).resolve():
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_no_text_names_the_other_kedge_as_something_to_install() -> None:
    """`kedge` on PyPI is another project: an extra, a version or an install line of that name is a stranger's code."""
    other = re.compile(
        r"(?<![\w./-])kedge(\[[a-z]|\s*[=<>~!]=\s*\d)"
        r"|\b(pip|pipx|uv|uvx|conda|poetry)\s[^\n`;]*(?<=[\s\"'])kedge(?![\w./-])"
        r"|\b(version|distribution)\([\"']kedge[\"']"
    )
    found = [f"{path}: {match[0]}" for path, text in texts() for match in other.finditer(text)]
    assert found == []


def test_every_extra_that_is_named_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{DISTRIBUTION}"' in project
    extras = set(re.findall(r"^([\w-]+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    named = re.compile(r"install_line\(\"([\w-]+)|install -e '?\.\[([\w,-]+)\]")
    found = {
        extra
        for path, text in texts()
        if path.parts[0] != "tests"
        for match in named.finditer(text.replace("'", '"').replace('-e "', "-e '"))
        for extra in str(match[1] or match[2]).split(",")
    }
    assert len(found) > 6
    assert found <= extras


def table(path: Path) -> dict[str, Any]:
    return pytest.importorskip("tomllib").loads(path.read_text(encoding="utf-8"))  # from Python 3.11 on


@pytest.mark.parametrize("name", ["base", "inspect", "tasks"])
def test_a_package_that_stands_alone_declares_what_it_imports(name: str) -> None:
    """Its own distribution has neither the dependencies nor the entry points of `kedge-rl`."""
    project = table(ROOT / "distributions" / name / "pyproject.toml")["project"]
    base = table(ROOT / "distributions" / "base" / "pyproject.toml")["project"]["dependencies"]
    extras = [entry for entries in project.get("optional-dependencies", {}).values() for entry in entries]
    listed = [*project["dependencies"], *base, *extras]
    if name != "base":
        assert f"kedge-base=={__version__}" in project["dependencies"]
    declared = {normalized(re.split(r"[<>=;\s]", entry)[0]) for entry in listed}
    paths = (ROOT / "src" / f"kedge_{name}").rglob("*.py")
    foreign = {name for path in paths for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    foreign -= sys.stdlib_module_names | PACKAGES | {"IPython"}
    foreign -= {"torch"} if name == "base" else set()  # whose generators are seeded if it is there
    homes = packages_distributions()
    assert {name for name in foreign if not declared & {normalized(home) for home in homes.get(name, [name])}} == set()


def test_every_package_is_in_an_sdist_and_its_wheel() -> None:
    """A wheel is built from the sdist; a package that only the wheel lists is missing there without an error."""
    targets = table(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]
    packages = set(targets["wheel"]["packages"])
    assert packages == {each for each in targets["sdist"]["only-include"] if each.startswith("src/")}
    alone = {path.name for path in (ROOT / "distributions").iterdir() if path.is_dir()}
    alone = {"ppo_conformance" if name == "conformance" else f"kedge_{name}" for name in alone}
    assert {path.parent.name for path in (ROOT / "src").glob("*/__init__.py")} == alone | {
        package.removeprefix("src/") for package in packages
    }


def test_the_conformance_suite_needs_numpy_and_otherwise_extras() -> None:
    """An adapter imports the library that whoever runs it has."""
    project = table(ROOT / "distributions" / "conformance" / "pyproject.toml")["project"]
    declared = {re.split(r"[<>=]", entry)[0] for entry in project["dependencies"]}
    assert declared == {"numpy"}
    needed = {
        path.relative_to(ROOT / "src" / "ppo_conformance").as_posix(): names - sys.stdlib_module_names - declared
        for path in (ROOT / "src" / "ppo_conformance").rglob("*.py")
        if "adapters" not in path.parts
        for names in [set(imported(ast.parse(path.read_text(encoding="utf-8")))) - {"ppo_conformance"}]
    }
    with_more = {path: names for path, names in needed.items() if names}
    extras = {
        name: {re.split(r"[<>=]", entry)[0] for entry in entries}
        for name, entries in project["optional-dependencies"].items()
    }
    assert with_more == dict.fromkeys(("plugin.py", "test_conformance.py"), extras.pop("pytest"))
    checks = (ROOT / "src" / "ppo_conformance" / "checks" / "tokens.py").read_text(encoding="utf-8")
    assert set(re.findall(r'\blibrary\("(\w+)', checks)) == extras.pop("tokens")  # imported where they are needed
    assert extras == {}


def test_entry_points_are_the_same_wherever_a_package_is_installed_from() -> None:
    whole = table(ROOT / "pyproject.toml")["project"]
    ranges = {normalized(re.split(r"[<>=;\s]", entry)[0]): entry for entry in whole["dependencies"]}
    ranges |= {
        normalized(re.split(r"[<>=;\s]", entry)[0]): entry
        for entries in whole["optional-dependencies"].values()
        for entry in entries
    }
    for path in sorted((ROOT / "distributions").glob("*/pyproject.toml")):
        project = table(path)["project"]
        if project["name"] == "ppo-conformance":  # it adds nothing to kedge
            continue
        package = f"kedge_{path.parent.name}"
        expected = {
            group: found
            for group, entries in whole["entry-points"].items()
            if (found := {name: place for name, place in entries.items() if place.startswith(f"{package}.")})
        }
        assert project.get("entry-points", {}) == expected
        extras = [entry for entries in project.get("optional-dependencies", {}).values() for entry in entries]
        for entry in [*project["dependencies"], *extras]:
            name = normalized(re.split(r"[<>=;\s]", entry)[0])
            assert name == "kedge-base" or entry == ranges[name]


PLACES = [ROOT, *sorted(path.parent for path in (ROOT / "distributions").glob("*/pyproject.toml"))]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_distribution_has_what_pypi_shows(place: Path) -> None:
    project = table(place / "pyproject.toml")["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert {"version", "readme", "urls"} == set(project["dynamic"])  # the last two from hatch_build.py
    assert project["description"]
    assert project["keywords"]
    assert project["classifiers"] == table(ROOT / "pyproject.toml")["project"]["classifiers"]
    for name in ("LICENSE", "hatch_build.py"):  # an sdist has nothing outside of its folder
        assert (place / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """hatch_build.py, without hatchling, which the environment need not have."""
    for name, base in (("builders.hooks", "BuildHookInterface"), ("metadata", "MetadataHookInterface")):
        monkeypatch.setitem(sys.modules, f"hatchling.{name}.plugin.interface", SimpleNamespace(**{base: object}))
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_a_description_lead_to_the_repository(build: Any) -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.svg) [w](https://example.org) [up](../LICENSE) [here](#x)"
    found = build.absolute_links(text, "src/kedge_base/README.md", "https://example.org/k")
    at = "https://example.org/k"
    assert found == (
        f"[a]({at}/blob/main/src/kedge_base/docs/a.md#b) ![p]({at}/raw/main/src/kedge_base/docs/p.svg) "
        f"[w](https://example.org) [up]({at}/blob/main/src/LICENSE) [here](#x)"
    )
    assert build.absolute_links(text, "README.md", "") == "a  [w](https://example.org) up [here](#x)"


@pytest.mark.parametrize("name", ["kedge-rl", "kedge-base", "kedge-inspect", "kedge-tasks", "ppo-conformance"])
def test_no_description_has_a_relative_link_or_an_install_line_of_a_clone(build: Any, name: str) -> None:
    hook = build.Description()
    hook.root = str(ROOT if name == "kedge-rl" else ROOT / "distributions" / name.rpartition("-")[2])
    metadata: dict[str, Any] = {"name": name}
    hook.update(metadata)
    text = metadata["readme"]["text"]
    assert text.startswith("# ")
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("https://", "#"))] == []
    assert "pip install -e" not in text
    assert f"pip install {name}" in text or name == "kedge-base"


def test_the_version_has_a_section_in_the_changelog() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(__version__)}\] – (unreleased|\d{{4}}-\d\d-\d\d)$", changes, re.MULTILINE)


def test_a_tag_is_the_version() -> None:
    listed = ["git", "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
    tags = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert tags in ([], [f"v{__version__}"])

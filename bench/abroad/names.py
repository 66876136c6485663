"""Lists the names that other libraries log, from their own sources, in names.tsv.

    pip download --no-deps --dest WHEELS trl==1.16.0 verl==0.7.0 …
    .venv/bin/python -m bench.abroad.names WHEELS

A test holds the table of metrics to this list.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("names.tsv")
METRICS = r"_metrics(?:\[\w+\]|\[\"train\"\])?\[f?\"([^\"]+)\"\]"
LOGGED = r"\bmetrics\[\"([^\"]+)\"\]"
SOURCES = {
    "trl-grpo": (r"trl/trainer/grpo_trainer\.py", METRICS),
    "trl-rloo": (r"trl/trainer/rloo_trainer\.py", METRICS),
    "trl-ppo": (r"trl/(trainer|experimental/ppo)/ppo_trainer\.py", LOGGED),
    "trl-sft": (r"trl/trainer/sft_trainer\.py", METRICS),
    "trl-reward": (r"trl/trainer/(reward_trainer|utils)\.py", METRICS + r"|return \{\"(accuracy)\""),
    "verl": (
        r"verl/(trainer/ppo|workers|utils)/.*\.py",
        r"\"((?:actor|critic|response_length|prompt_length|num_turns)/[\w/]+)\"|timer\(\"(\w+)\"",
    ),
    "openrlhf": (
        r"openrlhf/trainer/(ppo_utils/.*|ray/ppo_(actor|critic)|ppo_trainer(_async)?)\.py",
        r"(?:status|info|metrics)\[\"([\w/]+)\"\]|\"(\w+)\": |^    (truncated|response_length|total_length): ",
    ),
    "openrlhf-sft": (r"openrlhf/trainer/sft_trainer\.py", r"\"([\w ]+)\": "),
    "openrlhf-reward": (r"openrlhf/trainer/rm_trainer\.py", r"\"([\w ]+)\": "),
    "sb3-ppo": (
        r"stable_baselines3/(ppo/ppo|common/(on_policy_algorithm|callbacks|base_class))\.py",
        r"record\(\"([^\"]+)\"",
    ),
}
"""By trainer: the files with its names, and an expression whose groups are the names."""


def logged_names(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """The trainer, the version and the name of everything that the trainers in a wheel log."""
    package, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        for trainer, (files, expression) in SOURCES.items():
            if not trainer.startswith({"stable_baselines3": "sb3"}.get(package, package)):
                continue
            paths = [path for path in archive.namelist() if re.fullmatch(rf"(.*purelib/)?{files}", path)]
            text = "\n".join(archive.read(path).decode() for path in paths)
            for name in sorted({_name(match) for match in re.finditer(expression, text, re.MULTILINE)}):
                yield trainer, version, name


def _name(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group)
    timed = match[0].startswith("timer")
    return f"timing_s/{name}" if timed else re.sub(r"\{[^}]*\}", "*", name)


def main() -> None:
    """Write the list."""
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    rows = sorted({row for wheel in wheels for row in logged_names(wheel)})
    versions: dict[tuple[str, str], list[str]] = {}
    for trainer, version, name in rows:
        versions.setdefault((trainer, name), []).append(version)
    head = "# Written by bench/abroad/names.py: what a trainer logs, and the versions read that have it."
    lines = [f"{trainer}\t{name}\t{' '.join(sorted(found, key=_order))}" for (trainer, name), found in versions.items()]
    LIST.write_text("\n".join([head, *lines, ""]), encoding="utf-8")


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    main()

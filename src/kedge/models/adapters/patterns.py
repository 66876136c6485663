"""Regular expressions in an adapter's settings: they are tried where they can be stopped, since some never end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from kedge.errors import ModelError

__all__ = ["check_patterns"]

SECONDS = 5.0
"""Time for all of them. Those of published adapters take milliseconds."""

_FORMS = {
    "target_modules": "{}",
    "exclude_modules": "{}",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}
"""The expression that PEFT makes of an entry, and matches with the names of all modules."""

_TRIAL = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name)
        re.match(pattern, name)
"""


def check_patterns(where: str, settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that the regular expressions in an adapter's settings end; an invalid one is left to PEFT.

    Args:
        where: Where the settings come from, for the message.
        settings: The settings, as in `adapter_config.json`.
        names: The names of the model's modules and weights.

    Raises:
        ModelError: They take longer than any real ones.
    """
    patterns = {name: _of(name, settings.get(name)) for name in _FORMS}
    every = [_FORMS[name].format(each) for name, several in patterns.items() for each in several]
    if not every:
        return
    trial = json.dumps([every, list(names)])
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRIAL],
            input=trial,
            text=True,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        given = " and ".join(name for name, several in patterns.items() if several)
        raise ModelError(
            f"{where}: matching {given} with the names of the model's modules takes over {SECONDS:g} s; list the names "
            "of layers instead of a regular expression"
        ) from error


def _of(name: str, value: object) -> list[str]:
    """The entries of a setting that PEFT takes for regular expressions and that are more than names."""
    if isinstance(value, str):
        entries = [] if name == "target_modules" and value.lower() == "all-linear" else [value]
    elif name in ("target_modules", "exclude_modules"):  # lists of them are of names
        return []
    else:
        entries = [each for each in value if isinstance(each, str)] if isinstance(value, (list, set, dict)) else []
    # Names alone are quick, unless there are very many.
    return entries if len(entries) > 100 or any(set(each) & set("*+?{|(") for each in entries) else []

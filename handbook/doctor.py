"""The sections of docs/doctor.md: the texts of the rules, and the docstrings of their checks."""

from __future__ import annotations

import inspect
import re

from bench.tables import renewed
from kedge_inspect.doctor import RULES, Rule
from kedge_inspect.look import look_of

MEANS_BEFORE = "Try: "


def with_rules(text: str) -> str:
    """The page with the sections of all rules between its markers renewed."""
    return renewed(text, "rules", _sections())


def _sections() -> str:
    """The rules by module, in the order of the findings."""
    rules = (*RULES, *look_of("control").rules)
    modules = {rule.check.__module__: inspect.getmodule(rule.check) for rule in rules}
    text = ""
    for name, module in modules.items():
        title, _, rest = inspect.getdoc(module).partition(": ")  # pyright: ignore[reportOptionalMemberAccess]
        text += f"\n## {title}\n\n{rest[:1].upper()}{rest[1:]}\n"
        text += "".join(_section(rule) for rule in rules if rule.check.__module__ == name)
    return text


def _section(rule: Rule) -> str:
    documented = inspect.getdoc(rule.check) or ""
    body = documented.replace(MEANS_BEFORE, f"Means: {rule.means}\n\n{MEANS_BEFORE}", 1)
    marked = re.sub(r"^(Seen|Means|Try|Threshold): ", r"*\1:* ", body, flags=re.MULTILINE)
    return f"\n### {rule.name}\n\n{marked}\n"

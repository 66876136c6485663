"""Turns another trainer's settings into kedge's by the tables of `kedge_base.libraries`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kedge.config.libraries import foreign_names, lead_of, without_links
from kedge.config.loading.load import nested, resolve
from kedge.config.loading.yaml_text import parse_value, to_yaml
from kedge.config.translation.reading import computed
from kedge.config.translation.trl_scripts import Computed
from kedge_base.errors import ConfigError
from kedge_base.libraries import DEFAULTS, NUMBERS, OTHER_UNIT, RULES
from kedge_base.texts import printable

SAME = {
    *NUMBERS,
    *("model", "data.prompts", "data.max_prompt_tokens", "ppo.num_updates", "ppo.whiten_rewards", "ppo.value_coef"),
    *("optimization.weight_decay", "optimization.max_grad_norm", "optimization.adam_eps", "checkpoint.keep"),
    *("runtime.seed", "runtime.trust_remote_code", "runtime.activation_checkpointing"),
} - {"ppo.critic_learning_rate"}
"""Fields whose values are taken as they are, unless a rule says otherwise."""

_CONDITION = re.compile(r"(!?)([\w.]+)(?:(!?=|>|~)(.*))?")


def translate(
    library: str, given: Mapping[str, Any], num_prompts: int | None = None, trainer: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Translate settings, with the library's defaults for those that are not given.

    Args:
        library: As in the tables.
        given: Settings by the library's names.
        num_prompts: Prompts in the data, which turn passes into updates.
        trainer: The library's trainer; of several with this name, or without one, the one that knows most of the
            settings.

    Returns:
        kedge's settings, and a line for each that was not just renamed: what is missing, what became something else
        and why, what must be set by hand, what has no counterpart.

    Raises:
        ConfigError: The advantage has no counterpart, or the settings do not fit together in kedge.
    """
    trainers = [name for owner, name in DEFAULTS if owner == library and name.startswith(trainer)]
    unread = {name: value for name, value in given.items() if isinstance(value, Computed) and name != "output_dir"}
    given = {name: value for name, value in given.items() if not isinstance(value, Computed)}
    trainer = max(trainers, key=lambda name: len(given.keys() & DEFAULTS[library, name]))
    defaults = {name: parse_value(text, name) for name, text in DEFAULTS[library, trainer].items()}
    values = {**defaults, **given, "num_prompts": num_prompts}
    # Reversed: of several arguments of a field, the first one counts.
    listed = [(name.removesuffix(".*"), here) for name, owner, here in foreign_names() if owner == library]
    rows = dict(reversed(listed))
    if given and not any(name in defaults or _place(name, rows) for name in given):
        raise ConfigError(f"no setting is one of {library}'s: {', '.join(list(given)[:3])}{', …' * (len(given) > 3)}")
    same = {
        name: field
        for name, here in rows.items()
        if (field := lead_of(here)[0]) in SAME and not OTHER_UNIT.search(here) and values.get(name) is not None
    }
    made = {field: values[name] for name, field in same.items()}
    known = " ".join(name for name, field in same.items() if values[name] == made[field])
    lines: list[str] = []
    for conditions, settings, remark in (rule[2:] for rule in RULES if rule[0] == library and rule[1] in ("", trainer)):
        if all(_holds(condition, values) for condition in conditions):
            known += f" {' '.join((*conditions, *settings))}"
            made |= {name: _value(text, values) for name, _, text in (each.partition("=") for each in settings)}
            lines += [_text(remark, values)] if remark else []
    if "ppo.advantage" not in made:
        named = next(name for name in ("algorithm.adv_estimator", "scale_rewards") if name in defaults)
        raise ConfigError(f"{named}={values[named]} has no counterpart in kedge; name another one: --set {named}=…")
    read = {
        *re.findall(r"[\w.]+", known),
        *(name for name in given if name[:7] == "critic." and "ppo.critic" not in made),
    }
    lines = [
        *(f"set {name}" for name in ("model", "data.prompts", "reward") if not made.get(name)),
        *lines,
        *(f"{name}={value}: computed by the script; --set {name}=… gives a value" for name, value in unread.items()),
        *_others(rows, {name: value for name, value in given.items() if name not in read}),
    ]
    try:
        resolve([made])
    except ConfigError as error:
        told = "".join(f" ({line})" for line in lines if (found := line.partition(":"))[1] and found[0] in str(error))
        raise ConfigError(f"the settings do not fit together in kedge: {error}{told}") from None
    return made, list(map(printable, lines))


def as_yaml(settings: Mapping[str, Any], lines: list[str]) -> str:
    """A file for `--config`, with the lines as comments."""
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + to_yaml(nested(settings), width=120)


def _others(rows: Mapping[str, str], others: Mapping[str, Any]) -> Iterator[str]:
    """List arguments that no rule reads, grouped by what the tables say about them or about their section."""
    found: dict[str, dict[str, None]] = {}
    for name, value in others.items():
        place = _place(name, rows)
        text = without_links(rows.get(place, "none: kedge has no such setting"))
        # Other arguments are off, or fixed in kedge; arguments of a template count even if false.
        if (value or "template_kwargs" in place) and value != -1 and text[0] in "`n" and not name.endswith("_target_"):
            shown = f"{name}={value}" if place == name else place if "." in place else name
            found.setdefault(text.replace("`", ""), {})[shown] = None
    for text, names in sorted(found.items(), key=lambda item: item[0].startswith("none")):
        yield f"{', '.join(names)}: {text.replace('none:', 'no counterpart:') if text[:4] == 'none' else f'see {text}'}"


def _place(name: str, rows: Mapping[str, str]) -> str:
    """The argument, or the section that it is in, that the tables list; empty if they list none."""
    while name and name not in rows:
        name = name.rpartition(".")[0]
    return name


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Check a condition of a rule; `kedge_base/library_rules.tsv` says what they mean."""
    found = _CONDITION.fullmatch(condition)
    assert found is not None
    negated, name, sign, text = found.groups()
    value = values.get(name)
    if not sign:
        return bool(value and value != -1) != bool(negated)
    if value is None or sign == ">":
        return isinstance(value, (int, float)) and value > float(computed(text, values))
    word, wanted = str(value).lower(), _text(text, values).lower().split("|")
    return any(part in word for part in wanted) if sign == "~" else (word in wanted) == (sign == "=")


def _value(text: str, values: Mapping[str, Any]) -> Any:
    """The value of a setting: an argument's value, or YAML with arguments substituted."""
    found = re.fullmatch("<([^<>]*)>", text)
    return computed(found[1], values) if found else parse_value(_text(text, values), text)


def _text(text: str, values: Mapping[str, Any]) -> str:
    return re.sub("<([^<>]*)>", lambda found: str(computed(found[1], values)), text)

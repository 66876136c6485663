"""The number of pairs of settings that refuse each other, found by trying values, and of settings; both may only fall.

`python -m tests.config.test_refusing_pairs` lists them.
"""

import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError

from kedge.config.explain.describe import all_fields, section_type
from kedge.config.schedules import check_schedules
from kedge.config.schema.field import Choice, forms
from kedge.config.schema.root import Config
from kedge.config.schema.section import Section, parameters_of
from kedge.config.stages import check_stage
from kedge_base.errors import ConfigError
from kedge_base.stage import find_stage

MOST_PAIRS = 65
"""The bound. A change that refuses another pair finds one that can be written without a refusal."""

MOST_SETTINGS = 110
"""The bound on the settings of `kedge ppo`. What only one value of a setting needs can be a parameter of that value."""

INPUTS = {"model": "m", "data.prompts": ["p"], "reward": ["r.py:f"], "data.demonstrations": ["d"]}
STARTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("ppo", {}),
    ("ppo", {"rollout.num_responses": 4, "ppo.advantage": "grpo", "ppo.kl_in": "loss"}),
    ("ppo", {"rollout.num_responses": 2, "ppo.critic": "separate", "ppo.eval_every": 5}),
    ("rlhf", {"data.comparisons": ["c"], "rlhf.num_rounds": 2, "rlhf.labeler": "l.py:f"}),
    ("rlhf", {"data.comparisons": ["c"], "rlhf.train_critic": True}),
    ("evaluate", {"evaluate.judge": "j.py:f"}),
    ("generate", {}),
)
"""Stages with settings from which one or two others are changed."""

NUMBERS = {int: (0, 1, 2, 500), float: (0.0, 0.5, 12.0)}
FURTHER: Mapping[str, Sequence[Any]] = {
    "checkpoint.keep_best": ["none", "reward/score_mean", "eval/win_rate"],
    "data.columns": [{"prompt": "x"}, {"comparisons.prompt": "y"}],
    "data.comparisons": [["c", "e"]],
    "data.mix": [[0.5, 0.5], {"p": 1, "q": 1}],
    "data.prompts": [["p", "q"]],
    "optimization.stages": [{"ppo": {"max_grad_norm": 2}}],
    "size": [[8, 2, 2]],
    "ppo.importance_mask": [{"token": [0.5, 2]}],
    "ppo.num_minibatches": [3],
    "ppo.value_loss": [{"hl_gauss": [-1, 1, 11]}],
    "reward": [["model"], ["model", "other"], []],
    "schedules": [
        {name: {1: value}}
        for name, value in {
            "optimization.max_grad_norm": 1,
            "ppo.clip_range_high": 0.1,
            "ppo.entropy_coef": 0.1,
            "ppo.gae_lambda": 0.9,
            "ppo.kl_coef": 0.1,
            "ppo.value_clip_range": 0.1,
            "rollout.max_new_tokens": 200,
        }.items()
    ],
}
"""Values of settings whose types do not show them."""


def values_of(annotation: Any, bounds: Sequence[Any] = ()) -> Iterator[Any]:
    """A few values that a type allows: all choices, and small, middling and large numbers."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in NUMBERS:
        limits = {type(bound): getattr(bound, type(bound).__name__.lower(), None) for bound in bounds}
        yield from (
            number
            for number in NUMBERS[annotation]
            if limits.get(Ge, number) <= number <= limits.get(Le, number)
            and limits.get(Gt, number - 1) < number < limits.get(Lt, number + 1)
        )
    elif annotation is bool:
        yield from (True, False)
    elif annotation is type(None):
        yield None
    elif annotation is str:
        yield "some.py:name"
    elif origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from values_of(arguments[0], arguments[1:])
    elif origin is Choice:
        yield from (value for form in forms(annotation) for value in values_of(form))
    elif origin in (Union, types.UnionType):
        yield from (value for part in arguments for value in values_of(part, bounds))
    elif origin is list:
        yield from ([], *([value] for value in values_of(arguments[0])))
    elif origin is dict and get_origin(arguments[0]) is Literal:
        kept = slice(None) if parameters_of(arguments[1]) else slice(-1, None)
        yield from ({name: value} for name in get_args(arguments[0]) for value in [*values_of(arguments[1])][kept])
    elif parameters := parameters_of(annotation):
        (first, field), *others = parameters.items()
        tried = [*values_of(field.annotation, field.metadata)]
        yield from tried
        for name, other in others:
            values = [*values_of(other.annotation, other.metadata), *FURTHER.get(name, ())]
            yield from ({first: alone, name: value} for alone in tried for value in values)


class Trials:
    """Trials of a stage's settings.

    Args:
        stage: The stage.
        start: Its settings, from which one or two others are changed.
    """

    def __init__(self, stage: str, start: Mapping[str, Any]) -> None:
        self.stage = stage
        self.start = {**INPUTS, **start}
        assert self.error({}) is None
        self.values = {
            name: [*values_of(field.annotation, field.metadata), *FURTHER.get(name, ())]
            for name, field in all_fields()
            if name not in ("out", "preset") and not name.startswith("control.")
        }
        with reads_by_check() as self.reads:
            self.alone = {name: [self.error({name: value}) for value in given] for name, given in self.values.items()}

    def error(self, settings: Mapping[str, Any]) -> str | None:
        """The line with which the start with these settings is refused."""
        nested: dict[str, Any] = {}
        for dotted, value in {**self.start, **settings}.items():
            *sections, name = dotted.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        try:
            config = Config.model_validate(nested)
            check_schedules(config, str)
            check_stage(config, self.stage)
        except (ConfigError, ValidationError) as error:
            return " ".join(str(error).split())
        return None

    def candidates(self, known: Collection[Any]) -> list[tuple[str, str]]:
        """The pairs of settings that a check reads together, apart from known checks."""
        read = [sorted(names & self.values.keys()) for check, names in self.reads.items() if check not in known]
        pairs = {pair for names in read for pair in combinations(names, 2)}
        # The values of a schedule are checked as if they were set.
        pairs |= {
            (min(name, "schedules"), max(name, "schedules")) for names in read for name in {*names} - {"schedules"}
        }
        return sorted(pairs)

    def refusal(self, one: str, other: str) -> str | None:
        """The refusal of values of two settings, each accepted alone; or of a value that the other setting cures."""
        tried = (zip(self.values[name], self.alone[name], strict=True) for name in (one, other))
        for (value, error), (second, second_error) in product(*tried):
            together = self.error({one: value, other: second})
            alone = error or second_error
            if (together is None) != (alone is None):
                return together or alone
        return None


class Recorded(set[str]):
    """The names of the settings that were given; a check that asks for one of them reads it."""

    def __init__(self, names: Collection[str], record: Callable[[str], None]) -> None:
        super().__init__(names)
        self.record = record

    def __contains__(self, name: object) -> bool:
        self.record(str(name))
        return super().__contains__(name)


@contextmanager
def reads_by_check() -> Iterator[Mapping[Any, set[str]]]:
    """Record the settings that each check reads, by the code of the innermost function with that name."""
    reads: dict[Any, set[str]] = defaultdict(set)
    names = {("Config", name): name for name in Config.model_fields}
    for dotted, _ in all_fields():
        section, _, name = dotted.rpartition(".")
        if (kind := section_type(section)) is not None:
            names[kind.__name__, name] = dotted

    def record(section: str, name: str) -> None:
        if dotted := names.get((section, name)):
            frame = sys._getframe(2)
            while frame and not frame.f_code.co_name.lstrip("_").startswith("check"):
                frame = frame.f_back
            reads[frame and frame.f_code].add(dotted)

    def read(section: Section, name: str) -> Any:
        found = object.__getattribute__(section, name)
        record(type(section).__name__, name)
        return Recorded(found, partial(record, type(section).__name__)) if name == "model_fields_set" else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", read)
        yield reads


def refusing_pairs() -> dict[tuple[str, str], str]:
    """The pairs of settings that refuse each other, in any stage, each with one of its refusals."""
    found: dict[tuple[str, str], str] = {}
    known: set[Any] = set()
    for stage, start in STARTS:
        trials = Trials(stage, start)
        for pair in trials.candidates(() if stage == "ppo" else known):
            if pair not in found and (refusal := trials.refusal(*pair)):
                found[pair] = refusal
        if stage == "ppo":
            known |= trials.reads.keys()
    return found


def settings_of(stage: str) -> list[str]:
    """The settings that a stage reads: those of its sections, and those at the top level."""
    sections = {section for group in find_stage(stage).sections for section in group}
    return [
        name
        for name, _ in all_fields()
        if (name.partition(".")[0] in sections or "." not in name) and name not in find_stage(stage).unread
    ]


def test_ppo_has_no_further_settings() -> None:
    number = len(settings_of("ppo"))
    assert number <= MOST_SETTINGS, (
        f"kedge ppo has {number} settings, of at most {MOST_SETTINGS}: make the new one a value of another, or a "
        "parameter of the value that alone needs it, as in ppo.advantage={gigpo: 1.0}; or let it replace one "
        "(CONTRIBUTING.md, Adding a detail)"
    )


def test_no_further_settings_refuse_each_other() -> None:
    assert len(refusing_pairs()) <= MOST_PAIRS, (
        "write the two settings as one, so that no pair is refused; "
        "python -m tests.config.test_refusing_pairs lists all"
    )


if __name__ == "__main__":
    print(f"{len(settings_of('ppo'))} settings of ppo")
    for number, ((one, other), refusal) in enumerate(sorted(refusing_pairs().items()), 1):
        print(f"{number:3} {one} {other}: {refusal[:160]}")

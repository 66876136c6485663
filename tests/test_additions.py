"""What a new estimator, preset or verifier needs: a test that fails names every place where it is missing."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kedge.config import config_from_settings
from kedge.config.explain.describe import all_fields
from kedge.config.presets import FAMILY, LANGUAGE_PRESETS
from kedge.config.schema.field import choice_name, field_doc
from kedge.stages.ppo.settings import advantage_of
from kedge_base.estimators import CRITICS, ESTIMATORS, Estimator, estimator_of
from kedge_inspect.doctor.rewards import FORMS
from kedge_tasks import verify
from tests.config.test_refusing_pairs import values_of
from tests.oracle.slow import WHITENS
from tests.oracle.test_presets import SIZES
from tests.tasks.verify import test_hostile, test_trl, test_unfinished
from tests.training.test_family import PAPERS

ROOT = Path(__file__).resolve().parent.parent
FIELDS = dict(all_fields())


def check(places: Mapping[str, tuple[Collection[str], Collection[str]]]) -> None:
    """Fail with a line for each place, which says what belongs there, and each name that it needs and lacks."""
    lines = [f"{name} lacks {place}" for place, (needed, has) in places.items() for name in needed if name not in has]
    assert not lines, "\n" + "\n".join(lines)


def in_first_columns(page: str) -> set[str]:
    """The names in backticks in the first column of a page's tables."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return {name for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)}


def words_of(field: str) -> set[str]:
    """The words that a setting accepts, without functions of the user's."""
    info = FIELDS[field]
    return {word for value in values_of(info.annotation, info.metadata) if ":" not in (word := choice_name(value))}


def named_in(field: str) -> set[str]:
    """The words in the documentation of a setting."""
    return set(re.findall(r"[\w+]+", field_doc(FIELDS[field]).meaning))


def implemented(name: str) -> bool:
    """True if `advantage_of` has an estimator, which needs what its row says."""
    facts = estimator_of(name)
    several: Any = {"rollout.num_responses": 2} if facts.baseline == "group" else {}
    try:
        needs = advantage_of(config_from_settings("ppo", {"ppo.advantage": name, **several})).needs
    except KeyError:
        return False
    by_group = facts.baseline == "group" and facts.critic != "needed"
    expected = "values" if facts.critic == "needed" else "group" if by_group else None
    return needs == ("baseline" if facts.baseline in ("greedy", "history") else expected)


def test_an_estimator_is_everywhere_that_it_is_needed() -> None:
    accepted = words_of("ppo.advantage")
    names = {*ESTIMATORS, *accepted}
    written = {str(preset.values["ppo.advantage"].value) for preset in FAMILY if "ppo.advantage" in preset.values}
    calm = {name for name, facts in ESTIMATORS.items() if not facts.whitens}
    check({
        "a row with its facts in src/kedge_base/estimators.tsv": (names, ESTIMATORS),
        "a value of `advantage` in src/kedge/config/schema/update/advantages.py": (names, accepted),
        "its meaning in the docstring of that field": (names, named_in("ppo.advantage")),
        "its name in the docstring of `whiten_advantages` there": (calm, named_in("ppo.whiten_advantages")),
        "an `Advantage` in `advantage_of` (src/kedge/stages/ppo/settings.py) that needs what its row says":
            (names & accepted, [name for name in names & accepted if implemented(name)]),
        "its formula, owner and test in a row of docs/algorithm.md, section 9":
            (names, in_first_columns("algorithm.md")),
        "how a preset computes it, in `experience` of tests/oracle/slow.py": (written, WHITENS),
    })  # fmt: skip


def test_the_table_of_estimators_has_the_values_that_its_columns_allow() -> None:
    kinds = get_type_hints(Estimator)
    for name, facts in ESTIMATORS.items():
        for column, kind in kinds.items():
            value = getattr(facts, column)
            assert value in get_args(kind) if get_args(kind) else isinstance(value, kind), (
                f"{name}: {column} is {value!r}"
            )
        assert facts.adds_to in ("none", *ESTIMATORS), name
        assert facts.baseline == "group" or (facts.process == "reward" and not facts.divides), name
        assert WHITENS.get(name, facts.whitens) == facts.whitens, name
    assert {*CRITICS, "auto"} == words_of("ppo.critic"), (
        "CRITICS in src/kedge_base/estimators.py needs an entry for each value"
    )


def test_a_preset_is_everywhere_that_it_is_needed() -> None:
    names = [preset.name for preset in FAMILY]
    configured = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    check({
        "a row in docs/family.md": (names, in_first_columns("family.md")),
        "its name in the list of docs/configuration.md": (LANGUAGE_PRESETS, re.findall(r"`([\w+-]+)`", configured)),
        "the paper's objective in `PAPERS` (tests/training/test_family.py)": (names, PAPERS),
        "a size in `SIZES` (tests/oracle/test_presets.py), for the comparison with the slow update":
            (LANGUAGE_PRESETS, SIZES),
    })  # fmt: skip


def test_a_verifier_is_everywhere_that_it_is_needed() -> None:
    names = {*verify.__all__} - {"instruction_text"}  # which is no verifier
    tried = names - {"reasoning_gym"}  # whose answers are those of another package
    ends = tried - {"math", "tags", "code", "code_stdio"}  # each in a test of its own in that file
    texts = ends - {"pattern", "instructions_partial"} | {"tags"}  # the user's expression; the rules of instructions
    free = {"exact", "normalized", "f1", "pattern", "instructions", "instructions_partial", "reasoning_gym"}
    check({
        "a row in docs/verifiers.md": (names - {"instructions_partial"}, in_first_columns("verifiers.md")),
        "a row, a right and a wrong response in `CASES` (tests/tasks/verify/test_trl.py)": (tried, test_trl.CASES),
        "a right response in `ANSWERED` (tests/tasks/verify/test_unfinished.py), which must not count in a thought":
            (ends, [each[0].__name__ for each in test_unfinished.ANSWERED]),
        "a reference in `VERIFIERS` (tests/tasks/verify/test_hostile.py), to be timed on long responses":
            (texts, [each.__name__ for each in test_hostile.VERIFIERS]),
        "the form of its answer in `FORMS` (src/kedge_inspect/doctor/rewards.py), or its name in `free` here if any "
        "text is one": (names - free, FORMS),
    })  # fmt: skip

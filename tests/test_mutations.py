"""Every mutation of the table makes a test fail, and the mutation script can itself fail (spec §12.7)."""

import re
from dataclasses import replace

import pytest

from tests import mutations
from tests.mutation import Mutation, StaleMutationError, find
from tests.mutation_table import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_test_notices(mutation: Mutation, tmp_path):
    trial = mutations.try_mutation(mutation, tmp_path)
    assert trial.killed, trial.output


@pytest.mark.slow  # what runs here are tests of this suite, which fail on their own if the source is wrong
def test_without_a_mutation_the_same_tests_pass(tmp_path):
    trial = mutations.try_without(MUTATIONS, tmp_path)
    assert trial.exit_code == 0, trial.output


@pytest.mark.parametrize("added", ["  ", " + 0"], ids=["same code", "other code"])
def test_a_change_that_changes_nothing_survives(added, capsys, monkeypatch):
    harmless = replace(MUTATIONS[1], mutated=MUTATIONS[1].original + added)
    monkeypatch.setattr(mutations, "MUTATIONS", (harmless,))
    assert mutations.main([]) == 1
    assert "SURVIVED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [{"mutated": "return undefined, (last + 1)"}, {"test": "tests/algorithm/test_shaping.py::test_that_is_not_there"}],
    ids=["crash", "no such test"],
)
def test_what_does_not_run_is_not_killed(tmp_path, changes):
    trial = mutations.try_mutation(replace(MUTATIONS[1], **changes), tmp_path)
    assert trial.verdict == "BROKEN"


def test_a_text_that_is_not_there_exactly_once_is_an_error(tmp_path):
    mutation = MUTATIONS[1]
    for changes in ({"original": "no such text"}, {"original": "e"}, {"where": "no_such_function"}):
        stale = replace(mutation, **changes)
        with pytest.raises(StaleMutationError, match=f"{re.escape(stale.where)} holds .* times, not once"):
            mutations.try_mutation(stale, tmp_path)


def test_a_mutation_is_found_by_the_name_of_its_function(tmp_path):
    """Neither its file nor the functions around it count, nor the same text in others."""
    mutation = Mutation("name", "Outer.method", "return 1", "return 2", "")
    package = tmp_path / "package"
    package.mkdir()
    text = "class Outer:\n    @property\n    def method(self):\n        # é\n        return 1\n"
    (package / "one.py").write_text(f"def method():\n    return 1\n\n\n{text}", encoding="utf-8")
    (package / "two.py").write_text("def Outer():\n    return 1\n", encoding="utf-8")
    file, offset = find(mutation, tmp_path)
    assert file == "package/one.py"
    assert (package / "one.py").read_text(encoding="utf-8")[:offset].count("return 1") == 1
    with pytest.raises(StaleMutationError, match="2 times, not once"):
        find(replace(mutation, where="method"), tmp_path)
    assert find(replace(mutation, where="one.method"), tmp_path).offset < offset


def test_names_are_known_and_listed(capsys):
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert mutations.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(mutation.name in listed for mutation in MUTATIONS)
    with pytest.raises(SystemExit):
        mutations.main(["no-such-mutation"])

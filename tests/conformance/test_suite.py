"""The suite itself: vectors, runner, command and plugin, on adapters of a few lines that need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from ppo_conformance import vectors
from ppo_conformance.__main__ import main
from ppo_conformance.checks import all_checks
from ppo_conformance.oracle.__main__ import filled, same
from ppo_conformance.protocol import CHOICES, METHODS, Adapter, NotOffered
from ppo_conformance.results import adapter_names

SOURCE = Path(vectors.__file__).parents[2]

RIGHT = """
import numpy as np
from ppo_conformance import Adapter as Base

class Adapter(Base):
    name = "small"
    profile = {"whitening": "mean_and_std", "whitening_bessel": "yes", "tools": "yes", "left_padding": "yes"}

    def version(self):
        return "1.2"

    def whiten(self, values, mask, settings):
        kept = values[mask]
        std = kept.std(ddof=1) if len(kept) > 1 else 1.0
        return np.where(mask, (values - kept.mean()) / (std + 1e-8), 0.0)
"""
OVER_PADDING = RIGHT.replace("values[mask]", "values.ravel()")


def adapter(folder: Path, text: str) -> str:
    path = folder / "adapter.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("topic", vectors.topics())
def test_the_oracle_makes_the_committed_vectors(topic: str) -> None:
    assert same(filled(topic), vectors.read(topic))


@pytest.mark.parametrize("topic", vectors.topics())
def test_vectors_keep_to_the_schema_and_the_protocol(topic: str) -> None:
    found = vectors.read(topic)
    jsonschema.validate(found, json.loads((vectors.FOLDER / "schema.json").read_text("utf-8")))
    method = METHODS[found["method"]]
    assert hasattr(Adapter, found["method"])
    for case in found["cases"]:
        assert list(case["inputs"]) == list(method.inputs)
        for name, values in case.get("vary", {}).items():
            assert name not in CHOICES or (name in method.choices and set(values) <= set(CHOICES[name].values))
        for alternative in case["expected"]:
            assert list(alternative) == ["choices", *method.outputs]


def test_names_of_checks_are_unique() -> None:
    names = [check.name for check in all_checks()]
    assert len(set(names)) == len(names) > 200


def test_checks_are_listed_without_torch_or_a_trainer() -> None:
    code = (
        "import sys; from ppo_conformance.__main__ import main; main(['list'])\n"
        "assert not {'torch', 'transformers', 'kedge', 'kedge_base'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "vector/gae:padded" in done.stdout


def test_the_help_of_each_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for command, text in (("run", "run the checks;"), ("list", "list"), ("bugs", "re-made bugs"), ("page", "a table")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"\n\n{text} " in capsys.readouterr().out


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.fspath(SOURCE)}


@pytest.mark.parametrize(("argument", "code", "said"), [("--help", 0, "usage: "), ("--chek", 2, "")])
def test_the_oracle_writes_nothing_for_other_arguments(argument: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "ppo_conformance.oracle", argument]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout[: len("usage: ")]) == (code, said)


def test_a_right_adapter_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["run", "--adapter", adapter(tmp_path, RIGHT), "--json", str(report)]) == 0
    assert "small 1.2: " in capsys.readouterr().out
    found = json.loads(report.read_text("utf-8"))
    statuses = {each["status"] for each in found["results"]}
    assert statuses == {"passed", "not offered"}
    passed = {
        each["case"] for each in found["results"] if (each["check"], each["status"]) == ("vector/whiten", "passed")
    }
    assert passed == {case["name"] for case in vectors.read("whiten")["cases"]}


def test_a_bug_is_named_with_its_place_and_a_line_that_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = adapter(tmp_path, OVER_PADDING)
    assert main(["run", "--adapter", place, "--only", "vector/whiten"]) == 1
    out = capsys.readouterr().out
    assert "vector/whiten:padded deviates: with whitening=mean_and_std, whitening_bessel=yes at values[" in out
    line = f"ppo-conformance run --adapter {place} --only vector/whiten:padded"
    assert line in out
    assert main(line.split()[1:]) == 1
    assert main(["run", "--adapter", place, "--only", "metamorphic/padding:whiten_rubbish"]) == 1
    assert main(["run", "--adapter", place, "--only", "vector/whiten:equal", "--only", "vector/whiten:offset"]) == 1
    assert main(["run", "--adapter", place, "--only", "vector/whiten:offset"]) == 0


def test_an_option_without_effect_deviates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims_both = RIGHT.replace('"whitening_bessel": "yes"', '"whitening_bessel": "no yes"')
    place = adapter(tmp_path, claims_both)
    assert main(["run", "--adapter", place, "--only", "metamorphic/option_has_effect"]) == 1
    assert "whitening_bessel: no and yes give the same result in case padded" in capsys.readouterr().out


def test_a_number_that_is_not_finite_deviates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, report = adapter(tmp_path, RIGHT.replace("/ (std + 1e-8)", "/ (std - std)")), tmp_path / "report.json"
    with np.errstate(all="ignore"):
        assert main(["run", "--adapter", place, "--only", "*whiten*", "--json", str(report)]) == 1
    found = json.loads(report.read_text("utf-8"), parse_constant=pytest.fail)
    statuses = {(each["check"], each["status"]) for each in found["results"]}
    assert {("vector/whiten", "deviates"), ("metamorphic/rows", "deviates")} <= statuses
    assert not {status for check, status in statuses if check == "metamorphic/padding"} - {"deviates", "not offered"}
    assert "values of whiten is not finite" in capsys.readouterr().out


def test_an_exception_of_a_library_is_an_error_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = adapter(tmp_path, RIGHT.replace("kept = values[mask]", "kept = values.broken"))
    assert main(["run", "--adapter", place, "--only", "vector/whiten:padded"]) == 1
    assert (
        "error: AttributeError: 'numpy.ndarray' object has no attribute 'broken' (adapter.py:"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--adapter", "nobody"], None, "no adapter is named 'nobody'; there are "),
        (["--adapter", "missing.py"], None, "there is no file missing.py"),
        ([], "x = 1\n", "has no class Adapter(ppo_conformance.Adapter); see ppo_conformance.protocol"),
        ([], "class Adapter:\n    name = 'other'\n", "has no class Adapter(ppo_conformance.Adapter)"),
        ([], "from ppo_conformance import Adapter\n", "has no class Adapter(ppo_conformance.Adapter)"),
        ([], RIGHT.replace('"1.2"', "__import__('importlib').metadata.version('no-such-library')"), "no-such-library"),
        ([], RIGHT.replace('    def version(self):\n        return "1.2"', '    distribution = "no-such"'), "no-such"),
        ([], "import not_there_at_all\n", "No module named 'not_there_at_all'"),
        ([], RIGHT.replace('"yes"', '"maybe"'), "profile of small: whitening_bessel is 'maybe'; allowed: no, yes"),
        ([], RIGHT.replace('"tools"', '"toolz"'), "profile of small: no choice is named 'toolz'"),
        (["--only", "vector/nothing"], RIGHT, "no check matches 'vector/nothing'"),
        (["--json", "no/folder/report.json"], RIGHT, "there is no folder"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(
    arguments: list[str], text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if text is None else ["--adapter", adapter(tmp_path, text), *arguments]
    assert main(["run", *given]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_version_of_a_library_is_that_of_its_distribution() -> None:
    class Named(Adapter):
        distribution = "numpy"

    assert (Adapter().version(), Named().version()) == ("unknown", np.__version__)


def test_rows_are_ordered_by_groups_of_one_size() -> None:
    from ppo_conformance.adapters.torch_tools import by_group

    order, size = by_group(np.array([7, 3, 7, 3]))
    assert (order.tolist(), size) == ([1, 3, 0, 2], 2)
    assert by_group(np.array([5, 4]), least=1)[1] == 1
    for groups in ([1, 2], [1, 1, 2], [2, 1, 1]):
        with pytest.raises(NotOffered, match="groups have one size, above 1"):
            by_group(np.array(groups))


def test_every_adapter_of_the_suite_is_listed() -> None:
    assert "kedge" in adapter_names()


def test_the_plugin_has_a_test_per_case(tmp_path: Path) -> None:
    place = adapter(tmp_path, OVER_PADDING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ppo_conformance.plugin", "-p", "no:cacheprovider"]
    options: Any = {"capture_output": True, "text": True, "env": environment(), "cwd": tmp_path}
    wrong = subprocess.run([*command, "--pyargs", "ppo_conformance", "--adapter", "nobody"], **options)
    assert wrong.returncode == pytest.ExitCode.USAGE_ERROR
    assert wrong.stderr.splitlines()[0].startswith("ERROR: no adapter is named 'nobody'")
    chosen = ["--pyargs", "ppo_conformance", "--adapter", place, "-k", "whiten and padded or gae and td", "-rs"]
    done = subprocess.run([*command, *chosen], **options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"ppo-conformance run --adapter {place} --only vector/whiten:padded" in done.stdout
    assert "1 failed, 1 skipped" in done.stdout

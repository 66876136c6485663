r"""Numbers and mathematics: hand-made cases, and numbers spelled in many ways against the value they were made from."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.graders import HOSTILE
from kedge_base.errors import RewardError
from kedge_tasks.verify import answers, gsm8k, gsm8k_strict, json_schema, math, number, pattern
from kedge_tasks.verify.answers import whole_quantity
from kedge_tasks.verify.checking import Expired, deadline

ROW = "She sold 48 + 24 = <<48+24=72>>72 clips.\n#### 72"


def reason(verifier, text, answer, **more):
    [verdict] = verifier([text], [answer], **more)
    assert float(verdict) == (verdict.reason == "right")
    return verdict.reason


@pytest.mark.parametrize(
    "text",
    [
        "#### 72",
        "####72",
        "so\n#### 72.0\nDone.",
        "#### $72.00.",
        "#### 72 clips",
        "#### 72%",
        "#### **72**",
        "#### x = 72",
        "#### 144/2",
        "#### 71\n#### 72",
        r"it is $\boxed{72}$",
        r"\boxed{72 \text{ clips}}",
        r"\boxed{\frac{144}{2}}",
        r"\boxed{\boxed{72}}",
        "48 and 24 make 72.",
        "**72**",
        "$72$",
        "\\(72\\)",
        "(72)",
        "#### Summary\n24 and 48 are 72",
        "first 3, then 72 clips!",
        "70 + 2 = 72",
        "#### 72\r\n",
        "#### 72!",
        "#### 72 m^2",
        "#### 72 m²",
        "#### 72m",
        "#### 72 t",
        "#### 72元",
        "#### 72 ч.",
        "#### 72 a day.",
        r"\boxed{72\text{ cm}^2}",
        r"\boxed{72 \mathrm{~cm}}",
        r"\boxed{72\ \text{cm}}",
        r"\boxed{72^\circ}",
        r"\boxed{\textbf{72}}",
        r"\boxed{7.2 \times 10^1}",
    ],
)
def test_the_final_number_is_found(text):
    assert reason(gsm8k, text, ROW) == "right"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 73", "wrong value"),
        ("#### -72", "wrong value"),
        ("#### 72\n#### 71", "wrong value"),
        ("72 clips, of which 48 in April", "wrong value"),
        ("#### 72 thousand", "wrong value"),
        ("#### 7.2", "wrong value"),
        ("72 - 1 = 71", "wrong value"),
        ("#### 72e1", "wrong value"),
        ("#### 72. Add the clips\nThis gives 71.", "wrong value"),
        (r"72, so \boxed{71}", "wrong value"),
        ("#### 71 or 72", "wrong format"),
        ("#### 5 of 72", "wrong format"),
        (r"\boxed{71 or 72}", "wrong format"),
        ("#### 7,2", "wrong format"),
        ("at 10:72", "wrong format"),
        ("72^2", "wrong format"),
        ("#### 72/0", "wrong format"),
        ("1" * 5000, "wrong format"),
        ("seventy-two", "no answer found"),
        ("#### 72x", "wrong format"),
        ("#### 72k", "wrong value"),
        ("#### 72²", "wrong format"),
        ("an area of 72²", "wrong format"),
        ("#### 72K", "wrong value"),
        ("about 72⁴", "wrong format"),
        ("about 72¹²", "wrong format"),
        ("#### 72½", "wrong value"),
        ("72⅛ miles", "wrong value"),
        ("", "no answer found"),
        ("x72 and H72O", "no answer found"),
    ],
)
def test_what_is_no_right_answer_says_why(text, expected):
    assert reason(gsm8k, text, ROW) == expected


def test_the_strict_form_is_the_data_s():
    assert reason(gsm8k_strict, "#### 72", ROW) == "right"
    assert reason(gsm8k_strict, "#### 71", ROW) == "wrong value"
    assert reason(gsm8k_strict, r"\boxed{72}", ROW) == "wrong format"
    assert reason(gsm8k_strict, "I do not know", ROW) == "no answer found"


def test_a_response_that_was_cut_off_has_only_the_answer_that_is_complete():
    cut = {"stopped": [False]}
    assert reason(gsm8k, "#### 72", ROW, **cut) == "cut off"  # of #### 720
    assert reason(gsm8k, "#### 72\nAnd", ROW, **cut) == "right"
    assert reason(gsm8k, r"\boxed{72}", ROW, **cut) == "right"
    assert reason(gsm8k, r"\boxed{72", ROW, **cut) == "cut off"
    assert reason(gsm8k, "48 + 24 = 72", ROW, **cut) == "cut off"
    assert reason(gsm8k, "#### 71\n", ROW, **cut) == "wrong value"
    assert reason(gsm8k_strict, "so it is 72", ROW, **cut) == "cut off"


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        (51.0, "#### 51", "right"),
        (0.1, "1/10", "right"),
        ("1/3", "0.333", "wrong value"),
        ("1 1/2", "1.5", "right"),
        ("$42", "42", "right"),
        ("$42", "$42.00", "right"),
        ("$42", "€42", "wrong unit"),
        ("$42", "42%", "wrong unit"),
        ("42%", "42", "wrong unit"),
        ("42%", "42 percent", "right"),
        ("42%", "0.42", "right"),
        ("42%", "$42", "wrong unit"),
        ("0.5", "50%", "right"),
        ("1,234", "1234", "right"),
        (-3, "−3", "right"),
        (-3, "-$3", "right"),
        ("2 million", "2,000,000", "right"),
        (10**30, "1e30", "right"),
        ("42\n", "42", "right"),
        ("-3/4", r"so $x = -\frac{3}{4}$.", "right"),
        ("3/4", r"so $x = -\frac{3}{4}$.", "wrong value"),
        ("-3/4", r"\boxed{-\frac34}", "right"),
        ("-1/2", r"\boxed{\frac{-1}{2}}", "right"),
        ("2.5", r"2\frac{1}{2}", "right"),
        ("3/4", r"5-\frac{3}{4}", "right"),
        (-5, "x = - 5", "right"),
        (5, "x = - 5", "wrong value"),
        (-3, "The answer is - 3.", "right"),
        (-5, r"\boxed{- 5}", "right"),
        (42, "- 42 apples", "right"),  # an entry of a list
        (12500, r"\boxed{12{,}500}", "right"),
        (12500, r"\boxed{12\,500}", "right"),
        (12500, "12\u202f500", "right"),
        (12500, "It costs 12 500.", "right"),
        (500, "It costs 12 500.", "wrong value"),
        (0, "It costs 12 000.", "wrong value"),
        ("1234567.5", "1 234 567.5", "right"),
        (500, "of 12, 500", "right"),
        ("1.5", "I ate 1½.", "right"),
        (1, "I ate 1 ½", "wrong value"),
        ("-1/2", "#### -½", "right"),
        (0.032, r"$3.2\times10^{-2}$", "right"),
    ],
)
def test_units_and_forms_of_plain_numbers(answer, text, expected):
    assert reason(number, text, answer) == expected


@pytest.mark.parametrize("answer", [None, True, "", "forty", "1,23", float("nan"), "4 or 5", ["4"], "2x"])
def test_a_row_without_a_number_is_named(answer):
    with pytest.raises(
        RewardError, match=r"column 'answer', prompt 2: .* is not usable; expected a number, such as 42"
    ):
        number.check_rows(answer=[1, answer])


def test_a_solution_without_its_answer_is_named():
    with pytest.raises(RewardError, match=r"column 'answer', prompt 1: '72' is not usable; .* '… #### 42'"):
        gsm8k(["#### 72"], ["72"])
    assert reason(gsm8k, "#### 72", "so\r\n#### 72\r\n") == "right"


SPELLINGS = (
    lambda v: f"{v}",
    lambda v: f"{v:,}",
    lambda v: f"{v}.0",
    lambda v: f"{v:,}.00",
    lambda v: f"{v}.",
    lambda v: f"${v:,}",
    lambda v: f"{v} miles",
    lambda v: f"{3 * v}/3",
    lambda v: f"**{v}**",
    lambda v: f"{v} km/h",
    lambda v: f"= {v}",
    lambda v: f"${v}$",
    lambda v: f"\\${v}",
    lambda v: str(v).replace("-", "−"),
)


@given(st.integers(-(10**12), 10**12), st.sampled_from(SPELLINGS), st.integers(-5, 5))
@example(1234, SPELLINGS[1], 0)
def test_every_spelling_is_its_value_and_no_other(value, spell, apart):
    text = f"#### {spell(value)}"
    assert (reason(number, text, value + apart) == "right") == (apart == 0)
    assert (reason(number, f"12 and 13 make {spell(value)}", value + apart) == "right") == (apart == 0)


@given(st.integers(-999, 999), st.integers(0, 999), st.integers(1, 3))
def test_decimals_are_exact(whole, part, places):
    part %= 10**places
    text = f"{whole}.{part:0{places}}"
    quantity = whole_quantity(text)
    assert quantity is not None
    exact = Fraction(abs(whole) * 10**places + part, 10**places)
    assert quantity.value == (-exact if text.startswith("-") else exact)


@given(st.text(alphabet="0123456789.,:^/$%- #\\{}boxedfrac\n=*e", max_size=60))
def test_any_text_gets_a_verdict(text):
    for verifier, answer in ((gsm8k, ROW), (gsm8k_strict, ROW), (number, "7")):
        assert reason(verifier, text, answer)
        assert reason(verifier, text, answer, stopped=[False])


def test_long_texts_take_time_in_proportion():
    for piece in ("1", "1,", "1/", "#### 1\n", r"\boxed{", "$a", "1 %", r"\frac{", "1^", "#### a 1 "):
        reason(gsm8k, piece * 20_000, ROW)  # minutes, if a pattern could match in two ways


# math


HARMLESS = {
    r"\{0,…,2999\}": ["no answer found"],  # longer than an answer
    "(x+1)(x+1)…": ["wrong value", "took too long"],  # a tenth of a second or two
}
"""Hostile expressions that `math` has an answer for; all others exceed any time limit."""


@pytest.fixture
def library():
    pytest.importorskip("math_verify")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", "right"),
        ("x^2+1", r"\boxed{1 + x^2}", "right"),
        ("x^2+1", r"\boxed{x^2 - 1}", "wrong value"),
        ("x^2+1", "#### 1+x^2", "right"),
        ("x^2+1", "it is x^2+1", "no answer found"),
        (r"We get \boxed{7}.", r"\boxed{7}", "right"),
        ("1,2", r"\boxed{(1,2)}", "wrong value"),
        ("1,2", r"\boxed{2,1}", "right"),
        ("(1,2)", r"\boxed{(1,2)}", "right"),
        ("(1,2)", r"\boxed{\left( 1, 2 \right)}", "right"),
        (r"10\%", r"\boxed{10}", "wrong unit"),
        (r"10\%", r"\boxed{10\%}", "right"),
        (r"\frac{1}{3}", r"\boxed{0.3333333333}", "wrong value"),
        (3, r"\boxed{3.0}", "right"),
        ("1/2", r"<think>2</think><answer>\frac12</answer>", "right"),
        ("[0,1)", r"\boxed{[0,1]}", "wrong value"),
        ("2x", r"\boxed{2}", "wrong value"),
        ("2x", r"\boxed{2y}", "wrong value"),
        ("2x", r"\boxed{x + x}", "right"),
        ("8 k", r"\boxed{8 n}", "wrong value"),
        ("12ab", r"\boxed{12xy}", "wrong value"),
        ("3", r"\boxed{3i}", "wrong value"),
        ("3", r"\boxed{3!}", "wrong value"),
        ("6", r"\boxed{3!}", "right"),
        ("x = 5", r"\boxed{y=5}", "wrong value"),
        ("x = 1,234", r"\boxed{x=1234}", "right"),
        ("number of apples = 5", r"\boxed{n = 5}", "right"),
        ("5", r"\boxed{x=5}", "right"),
        ("12", r"\boxed{12 cm^2}", "right"),
        ("12", r"\boxed{12 km/h}", "right"),
        ("10 m/s", r"\boxed{10}", "right"),
        ("72", r"\boxed{72^\circ C}", "right"),
        ("1000", r"\boxed{1 000 km}", "right"),
        ("42", r"\boxed{42元}", "right"),
        ("6 xy", r"\boxed{6}", "wrong value"),
        ("10000", r"\boxed{10⁴}", "right"),
        ("10^{12}", r"\boxed{10¹²}", "right"),
        ("9/8", r"\boxed{1⅛}", "right"),
        ("x^{1/2}", r"\boxed{x^½}", "right"),
        ("25", r"\boxed{25²}", "wrong value"),
        ("625", r"\boxed{25²}", "right"),
        ("1", r"\boxed{1½}", "wrong value"),
        ("10", r"\boxed{10\text{ cm}}", "right"),
        (r"10\text{ cm}", r"\boxed{10}", "right"),
        ("10", r"\boxed{10cm}", "right"),
        ("18", r"\boxed{18 \text{ dollars}}", "right"),
        ("90", r"\boxed{90^\circ}", "right"),
        ("42", "#### 42 teams per day.", "right"),
    ],
)
def test_expressions(answer, text, expected):
    assert reason(math, text, answer) == expected


@pytest.mark.usefixtures("library")
def test_votes_for_an_expression_are_none_for_its_coefficient():
    texts = [r"\boxed{2x}", r"\boxed{2}", r"\boxed{2 \text{ dollars}}", r"\boxed{2 y}"]
    assert [verdict.answer for verdict in math(texts, [3] * 4)] == ["2x", "2", "2", "2y"]


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Hypothesis's, written in Python, would lose a time limit that expires in it, and say so."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.mark.usefixtures("library", "no_gc_callbacks")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_expression_costs_one_time_limit_and_harms_no_other(name, monkeypatch):
    monkeypatch.setattr(answers, "deadline", partial(deadline, seconds=0.5))
    alarm = signal.getsignal(signal.SIGALRM)
    texts = [r"\boxed{x+1}", rf"\boxed{{{HOSTILE[name]}}}", r"\boxed{1+x}"]
    first, hostile, last = (verdict.reason for verdict in math(texts, ["1+x"] * 3))
    assert (first, last) == ("right", "right")
    assert hostile in HARMLESS.get(name, ["took too long"])
    assert signal.getsignal(signal.SIGALRM) is alarm
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("verifier", "text", "column"),
    [(math, r"\boxed{x+1}", "1+x"), (pattern, "7", "7"), (json_schema, "7", {"type": "integer"})],
)
def test_off_the_main_thread_a_verifier_with_a_time_limit_is_refused_instead_of_giving_zeros(verifier, text, column):
    name = verifier.__name__
    line = f"^{name} needs the main thread for its time limit: pass its name, 'kedge_tasks.verify:{name}', so that it"
    with ThreadPoolExecutor(1) as pool, pytest.raises(RewardError, match=line):
        pool.submit(verifier, [text], [column]).result()


def test_a_library_that_catches_everything_is_still_stopped():
    def stubborn() -> None:
        try:
            while True:
                pass
        except BaseException:
            return

    with pytest.raises(Expired), deadline("math", 0.05):
        stubborn()
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_time_limit_leaves_the_worker_s_timer_alone():
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        with deadline("math", 10.0):
            pass
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

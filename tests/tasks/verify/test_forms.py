r"""Forms in which right and wrong answers are written: each kind in both directions, made up for these tests."""

from __future__ import annotations

import pytest

from kedge_base.errors import RewardError
from kedge_tasks.verify import choice, exact, gsm8k, math, normalized, number

SOLUTION = "She has 30 + 12 = <<30+12=42>>42 pens.\n#### 42"
CAPITALS = ["Berlin", "Vienna", "Prague", "Warsaw"]


def is_right(verifier, text, *columns):
    [verdict] = verifier([text], *([column] for column in columns))
    return float(verdict) == 1.0


RIGHT_NUMBERS = """#### The final answer is $42.
#### Answer: 42
#### Total: 42
#### 30 + 12 = 42
#### [42]
#### “42”
#### 42 pens in the whole box of hers
#### ４２
The answer is 42, not 41.
It is 42, not 12.
The answer is 42 rather than 41.
The answer is 42 since 30 plus 12.
The answer is 30 + 12 = 42.
**Answer: 42** (see page 3)
I'm not sure, but the answer is 42.
I don't know why, but 30+12 = 42.
The answer to part 1 is 30. Adding 12 gives 42.
The answer is 41. Wait, it is 42.
答案：４２支
答えは42です。
Die Antwort ist 42.
La respuesta es 42.
Ответ: 42.
=> 42
30 + 12 -> 42
The answer is 30 pens + 12 pens = 42 pens.
The answer as a share: 21 pens / 50 pens * 100 = 42
The answer is 84 / 2, which is 42.
The answer is 6 sevens = 42 pens.
The answer is 41.6, which rounds up to 42.
The answer is 42, since 50 - 8 / 1 = 42 and 42 / 6 = 7.
It adds up to 42.
This is rounded up to 42.
In 3 weeks, 42 pens are lost.
After 2 hours 42 miles are behind us.
I cannot see the picture. She has 42 pens.
I'm not able to find fault with 42 pens, so 42.
\\boxed{42~\\text{pens}}
Total (in pens) - 42""".splitlines()
WRONG_NUMBERS = """#### not 42
#### 40-42
#### 40 to 42
#### minus 42
#### 42k
The answer is not 42.
The answer isn't 42.
It can't be 42.
It is between 40 and 42.
40–42
41 or 42
at least 42
It can be up to 42.
Up to 42
The answer is not 6 * 7 = 42.
The answer is 42 pens * 2 = 84 pens.
The answer is 6 * 42, which is 252.
more than 42
x > 42
42 ± 1
42x
The answer is 42n.
So it is 42y, and no more.
41 ± 42
30 + 42
6 ≠ 42
2024-01-42
negative 42
30 minutes and 42 seconds
5 feet 42 inches
I don't know. 42?
I cannot answer this, sorry. There are 42 pens.
I am unable to solve it. 30 and 42 are given.
\\boxed{42} or rather \\boxed{42""".splitlines()


@pytest.mark.parametrize(
    "text", [*RIGHT_NUMBERS, "It is 42x as much.", "#### 42\u200b", "1. Take 30.\n2. Add 12: 42.\n3. Check it."]
)
def test_the_number_that_a_response_means_is_right(text):
    assert is_right(gsm8k, text, SOLUTION)


@pytest.mark.parametrize("text", WRONG_NUMBERS)
def test_a_number_that_a_response_does_not_claim_is_wrong(text):
    assert not is_right(gsm8k, text, SOLUTION)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (3_000_000, "$3M", "3"),
        (2500, "2.5k", "2.5"),
        (100, "10^2", "10"),
        ("0.01", "10^{-2}", "10^2"),
        (-7, "minus 7", "7"),
        (7, "7", "minus 7"),
        ("$18", "18 dollars", "18 cents"),
        ("$18", "18 USD", "18 euros"),
        ("18 cents", "18¢", "18 dollars"),
        ("10 cm", "10 centimetres", "10 m"),
        ("10 cm", "10", "It is 10 inches long."),
        ("5 hours", "5h", "5 minutes"),
        ("5 km/h", "5 km per hour", "5 m/s"),
        ("45", "45 minutes", "1 hour 45 minutes"),
        (12, "१२", "१३"),
        (-3, "－3", "３"),
        (1234, "1٬234", "1٫234"),
        (1500, "1.5 x 10^3", "1.5 x 10^2"),
        (1500, "1.5*10**3 = 1.5 · 10³", "1.5 · 10⁴"),
        ("0.0015", "1.5 × 10^−3", "1.5 × 10^3"),
        (10**12, "10^12", "10^1"),
        ("5/2", r"$2 \frac{1}{2}$", r"$\frac{1}{2}$"),
        ("5/2", r"\boxed{2\,\frac12}", r"\boxed{2 - \frac12}"),
        ("-1/2", r"- \frac{1}{2}", r"5 - \frac{1}{2}"),
        ("18 €", "#### 18€", "#### $18"),
        (18, "#### US$18", "#### 18€ or 19€"),
        (60, "#### 60 °C", "#### 60° or 61°"),
        (60, r"\boxed{60 \; \text{sq. ft.}}", r"\boxed{60. Add ft}"),
        (7, r"\boxed{{7}}", r"\boxed{{7}{8}}"),
        (12, "3 x 4 = 12", "3 x 12"),
    ],
)
def test_units_scales_and_scripts_of_numbers(answer, right, wrong):
    assert is_right(number, right, answer)
    assert not is_right(number, wrong, answer)


EXPRESSIONS = r"""
1.\overline{6} | \frac{5}{3} | 1.6
0.1\overline{6} | \frac16 | 0.\overline{16}
5\times10^{-19} | \frac{5}{10^{19}} | 6\times10^{-19}
\frac{1}{2^{80}} | 2^{-80} | \frac{1}{2^{81}}
(10^{-9}, 2) | (\frac{1}{10^9}, 2) | (10^{-10}, 2)
x=10^{-12} | 10^{-12} | x=10^{-11}
0.3\sqrt{2}+0.1 | \frac{3\sqrt2+1}{10} | 0.3\sqrt{2}
e^2 | exp(2) | exp(3)
5\sqrt2 | 5sqrt(2) | 2sqrt(5)
\frac{\sqrt3}{2} | \cos 30^\circ | \sin 30^\circ
3i | \sqrt{-9} | \sqrt{9}
x=1\pm\sqrt{3} | 1+\sqrt3, 1-\sqrt3 | 1+\sqrt3
P=(3,-1) | (3,-1) | (-1,3)
x=1,y=2 | y=2,x=1 | x=2,y=1
1<x\le4 | (1,4] | (1,4)
-2\leq t<5 | [-2,5) | (-2,5)
x>7 | (7,\infty) | (-\infty,7)
x \geqslant 5 | [5,\infty) | (5,\infty)
x<0 \text{ or } x>1 | (-\infty,0)\cup(1,\infty) | (0,1)
(2,\infty) | \{x \mid x>2\} | \{x \mid x\ge 2\}
x\neq 3 | (-\infty,3)\cup(3,\infty) | (-\infty,3)
\mathbb{R} | (-\infty,+\infty) | (0,\infty)
\mathbb{R} | ℝ | \mathbb{Z}
\mathbb{R}\setminus\{-1\} | (-\infty,-1)\cup(-1,\infty) | (-1,\infty)
5:2 | 5\colon 2 | 2:5
20\text{ cm}^2 | 20\text{ square centimeters} | 20\text{ cm}^3
15\text{ km/h} | 15\text{ km per hour} | 15\text{ mph}
2\sqrt5\text{ km} | 2\sqrt{5} | 2\sqrt5\text{ miles}
25^\circ\text{C} | 25 | 25^\circ\text{F}
\$5 | 5\text{ dollars} | 5\text{ cents}
6\text{ ft }2\text{ in} | 6\text{ feet }2\text{ inches} | 6\text{ ft }3\text{ in}
4:15\text{ p.m.} | 4:15 PM | 4:15\text{ a.m.}
10:30 | 10:30 | 5:15
BCDE | \text{BCDE} | BCED
\text{west} | west | stew
1101_2 | 1101_{2} | 1101_3
\text{(C)} | \textbf{(C)}\ 15 | \text{(D)}
5 | \textcolor{blue}{5} | \textcolor{blue}{6}
5 | \underline{5} | \underline{x}
5 | \begin{array}{l}5\end{array} | \begin{array}{l}5\\6\end{array}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | (\begin{array}{cc}1&2\\3&4\end{array}) | \begin{bmatrix}1&2\\4&3\end{bmatrix}
(3,\frac{\pi}{2}) | \bigl(3,\frac{\pi}{2}\bigr) | \bigl[3,\frac{\pi}{2}\bigr]
3-2i | 3-2\mathrm{i} | 3+2\mathrm{i}
x+y | ｘ＋ｙ | ｘ－ｙ
55 | ٥٥ | ٥٦
10^{-3} | 10⁻³ | 10³
\frac{11}{2} | 5 1/2 | 1 1/2
11/2 | 5\,\frac12 | 1 1/2
78 | 78 | 7 8
"""


@pytest.mark.parametrize("line", EXPRESSIONS.strip().split("\n"))
def test_forms_of_expressions(line):
    pytest.importorskip("math_verify")
    answer, right, wrong = line.split(" | ")
    assert is_right(math, rf"\boxed{{{right}}}", answer)
    assert not is_right(math, rf"\boxed{{{wrong}}}", answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"So \boxed5", True),
        (r"\fbox{5}", True),
        (r"\boxed{4}, no: \boxed{5}", True),
        (r"\boxed{5} or rather \boxed{4", False),
        ("The final answer is $5$.", True),
        ("Answer: **5**", True),
        ("Final Answer: The final answer is $5$. I hope it is correct.", True),
        ("Final Answer: The final answer is $6$. I hope it is correct.", False),
        ("答案：5", True),
        ("The answer is not 5.", False),
        ("The answer is 5 or 6.", False),
        ("The answer is 6.", False),
    ],
)
def test_where_an_expression_is_found(text, expected):
    pytest.importorskip("math_verify")
    assert is_right(math, text, "5") == expected


RIGHT_CHOICES = """Answer seems to be B
The answer to this question is B.
The answer is most likely B.
B is right.
Option (B) is true.
I would go with B.
I'd say B.
I would choose B over C.
Hence, B.
So B
It should be B
That's B.
The answer is not A but B.
The answer isn't A, it's B.
Not A; B.
A is incorrect, so B.
The answer is B, C is wrong.
The answer is B, I'm sure.
Answer: “B”
'B'
The answer is $\\mathbf{B}$
Antwort: (B)
La réponse est B.
La respuesta correcta es B.
答案：B
正解はBです
정답은 B입니다.
Правильный ответ: B
Ｂ
（Ｂ）
Ans: B
B is my answer.
B, because Berlin is larger.
The answer is \\(B\\).
{"answer": "B"}
The correct one is B.
La bonne réponse est la B.
故选 B。
正确选项是B
Vienna, not Berlin.
It's Vienna rather than Berlin.
Berlin is wrong; the answer is Vienna.""".splitlines()
WRONG_CHOICES = """B is not correct.
(B) is incorrect.
Don't choose B.
I would never choose B
The answer can't be B.
Neither A nor B.
Not B.
(B) and (C)
B, C
B or C
Both B and C are correct.
The answer is B and C
B#
B+
B*
Vitamin B
It is not Vienna.
Vienna or Prague
A) Vienna
I cannot answer that.
正确答案不是B，而是A
不应选B
{"answer": "C"}
The answer is C. B is a distractor.""".splitlines()


@pytest.mark.parametrize("text", RIGHT_CHOICES)
def test_the_option_that_a_response_means_is_right(text):
    assert is_right(choice, text, "B", CAPITALS)


@pytest.mark.parametrize("text", WRONG_CHOICES)
def test_an_option_that_a_response_does_not_choose_is_wrong(text):
    assert not is_right(choice, text, "B", CAPITALS)


def test_labels_as_digits_as_in_arc_easy():
    choices = {"text": CAPITALS, "label": ["1", "2", "3", "4"]}
    for answer in ("2", "(2)", "2. Vienna", "Vienna"):
        for text in ("2", "(2)", "The answer is 2.", "2. Vienna", "Vienna", r"\boxed{2}"):
            assert is_right(choice, text, answer, choices)
        for text in ("3", "The answer is 1.", "Berlin", "2 or 3"):
            assert not is_right(choice, text, answer, choices)


@pytest.mark.parametrize("answer", ["(B)", "B.", "B)", "B. Vienna", "(B) Vienna", "B: Vienna", " b "])
def test_labels_with_marks_or_their_text(answer):
    assert is_right(choice, "B", answer, CAPITALS)
    assert not is_right(choice, "A", answer, CAPITALS)


def test_labels_of_options_may_have_marks():
    assert is_right(choice, "B", "(B)", {"(A)": "Berlin", "(B)": "Vienna"})
    with pytest.raises(RewardError, match=r"'B\. Berlin' is not usable; expected a letter such as 'B'"):
        choice.check_rows(answer=["B. Berlin"], choices=[CAPITALS])


def test_labels_that_other_rows_have_are_no_options_of_this_one():
    """Parquet gives each row the labels of all rows, here with the text None, a word of the response."""
    choices = {"A": "red", "B": "blue", "C": None, "D": None}
    assert is_right(choice, "I see none: blue.", "B", choices)
    with pytest.raises(RewardError, match="'3' is not usable"):
        choice.check_rows(answer=["3"], choices=[choices])


@pytest.mark.parametrize("choices", [["True", "False"], ["yes", "no"]])
def test_booleans_choose_their_words(choices):
    for answer in (True, "True", "true"):
        assert is_right(choice, "A", answer, choices)
    for answer in (False, "False", "false"):
        assert is_right(choice, "B", answer, choices)


@pytest.mark.parametrize("answer", [["A", "C"], '["A", "C"]', "A, C", "A and C", "C;A", ["Berlin", "Prague"]])
def test_of_several_right_options_all_are_named(answer):
    for text in ("A and C", "(C), (A)", "The answer is A and C.", r"\boxed{A, C}"):
        assert is_right(choice, text, answer, CAPITALS)
    for text in ("A", "A, B", "A, B, C", "C"):
        assert not is_right(choice, text, answer, CAPITALS)


def test_a_number_as_an_answer_means_the_same_in_json_and_csv_or_is_refused():
    numbers = ["1", "2", "3", "4"]
    assert is_right(choice, "D", 3, numbers)  # a place
    assert is_right(choice, "B", "1", ["0", "1"])  # a place or a text, the same
    with pytest.raises(RewardError, match="'3' is not usable; expected a letter: C if that is the option's text, D if"):
        choice.check_rows(answer=["3"], choices=[numbers])
    with pytest.raises(RewardError, match="72 is not usable"):
        choice.check_rows(answer=[72], choices=[["70", "72"]])


@pytest.mark.parametrize(
    ("answer", "other"),
    [
        ("C#", "C"),
        ("A+", "A"),
        ("3/4", "34"),
        ("3:1", "31"),
        ("7-9", "79"),
        ("2*3", "23"),
        ("1,5", "15"),
        ("x²", "x2"),
        ("½", "12"),
        ("-5", "5"),
    ],
)
def test_signs_that_carry_meaning_stay_in_normalized_texts(answer, other):
    assert is_right(normalized, answer, answer)
    assert not is_right(normalized, other, answer)


def test_equal_characters_are_equal_however_they_are_composed():
    for answer, same in (
        ("it's", "it’s"),
        ("café", "cafe\u0301"),
        ("Ｐａｒｉｓ", "Paris"),
        ("1,500", "1500"),
        ("U.K.", "UK"),
    ):
        assert is_right(normalized, same, answer)
    assert is_right(exact, "cafe\u0301", "café")
    assert not is_right(exact, "Paris", "Ｐａｒｉｓ")

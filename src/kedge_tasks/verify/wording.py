r"""Wording of answers in responses: "the answer is", in several languages, and that something is not the answer.

Each constant is a fragment of a regular expression.
"""

from __future__ import annotations

ANSWER = (
    r"(?i:(?<![^\W_])(?:answer|ans(?=[ .:=])|antwort|lösung|r[eé]ponse|respuesta|risposta|resposta|antwoord|svar|"
    r"odpowiedź|ответ|cevap|jawaban)|答案|答え|正解|정답|답|الجواب|الإجابة|उत्तर|đáp án)"
)
"""Words for an answer."""

VERBS = "is|ist|est|es|è|é"
PARTICLES = "是|为|為|は|는|은"
IS = rf"(?i:\s{{0,4}}(?:(?:{VERBS})(?![^\W_])|{PARTICLES}|[:=—])){{1,2}}\s{{0,4}}"
"""Text between such a word and the answer."""

THE_ANSWER_IS = rf"{ANSWER}[^.\n:=0-9]{{0,60}}?{IS}"

NOT = "not|never|neither|nor|cannot"
INSTEAD_OF = "rather than|instead of"

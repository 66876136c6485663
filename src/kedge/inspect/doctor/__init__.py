"""The doctor: rules that read a run's figures and say what is wrong, and what to turn."""

from kedge.inspect.doctor.finding import Advice, Direction, Finding, Severity, no_advice
from kedge.inspect.doctor.registry import RULES, diagnose, graver
from kedge.inspect.doctor.telling import one_line, print_findings

__all__ = [
    "RULES",
    "Advice",
    "Direction",
    "Finding",
    "Severity",
    "diagnose",
    "graver",
    "no_advice",
    "one_line",
    "print_findings",
]

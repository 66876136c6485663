"""The doctor: rules that read a run's metrics, name what is wrong and suggest what to change."""

from kedge.inspect.doctor.finding import Advice, Direction, Finding, Severity, no_advice
from kedge.inspect.doctor.registry import RULES, diagnose, severity_rank
from kedge.inspect.doctor.terminal import one_line, print_findings

__all__ = [
    "RULES",
    "Advice",
    "Direction",
    "Finding",
    "Severity",
    "diagnose",
    "no_advice",
    "one_line",
    "print_findings",
    "severity_rank",
]

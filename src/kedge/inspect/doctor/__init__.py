"""The doctor: rules that read a run's metrics, name what is wrong and suggest what to change."""

from kedge.inspect.doctor.examination import Examination, merge
from kedge.inspect.doctor.finding import Advice, Direction, Finding, Severity, no_advice, severity_rank
from kedge.inspect.doctor.registry import RULES, diagnose, examine
from kedge.inspect.doctor.terminal import one_line, print_examinations

__all__ = [
    "RULES",
    "Advice",
    "Direction",
    "Examination",
    "Finding",
    "Severity",
    "diagnose",
    "examine",
    "merge",
    "no_advice",
    "one_line",
    "print_examinations",
    "severity_rank",
]

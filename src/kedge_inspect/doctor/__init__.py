"""The doctor: rules that read a run's metrics, name what is wrong and suggest what to change."""

from kedge_inspect.doctor.examine import RULES, Examination, diagnose, examine, merge, one_line, print_examinations
from kedge_inspect.doctor.rule import Advice, Direction, Finding, Rule, Severity, no_advice, severity_rank

__all__ = [
    "RULES",
    "Advice",
    "Direction",
    "Examination",
    "Finding",
    "Rule",
    "Severity",
    "diagnose",
    "examine",
    "merge",
    "no_advice",
    "one_line",
    "print_examinations",
    "severity_rank",
]

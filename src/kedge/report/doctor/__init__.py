"""The doctor: rules that read a run's figures and say what is wrong, and what to turn."""

from kedge.report.doctor.finding import Advice, Direction, Finding, Severity
from kedge.report.doctor.registry import RULES, diagnose, graver
from kedge.report.doctor.telling import one_line, print_findings

__all__ = ["RULES", "Advice", "Direction", "Finding", "Severity", "diagnose", "graver", "one_line", "print_findings"]

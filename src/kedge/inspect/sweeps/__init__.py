"""Sweeps as read from their folder: which runs belong to which setting, and how the settings compare."""

from kedge.inspect.sweeps.comparison import Goal, Row, choose_goal, compare, final_value, find_goal, leaders
from kedge.inspect.sweeps.folder import Setting, Sweep, SweptRun, read_sweep

__all__ = [
    "Goal",
    "Row",
    "Setting",
    "Sweep",
    "SweptRun",
    "choose_goal",
    "compare",
    "final_value",
    "find_goal",
    "leaders",
    "read_sweep",
]

"""`kedge sweep`: many runs of one stage with different settings and seeds, and a table of their results."""

from kedge.stages.sweep.grid import Trial, plan_trials
from kedge.stages.sweep.main import SweepResult, run_sweep

__all__ = ["SweepResult", "Trial", "plan_trials", "run_sweep"]

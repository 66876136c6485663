"""A cost model of PPO on a cluster: formulas, constants, and published figures to check them against.

Imports neither torch nor numpy, so that `kedge plan` is instant.
"""

from kedge.plan.cards import CARDS, Card
from kedge.plan.check import Band, band_of, checked_syncs, checked_updates
from kedge.plan.cluster import ClusterPlan, plan_cluster
from kedge.plan.layouts import NUMBERS, cheapest, sweep
from kedge.plan.published import KINDS
from kedge.plan.report import layout_name
from kedge.plan.shape import ModelShape, parse_parameters, read_shape, typical_shape
from kedge.plan.update import UpdateTime, update_time
from kedge.plan.work import Layout, Workload

__all__ = [
    "CARDS",
    "KINDS",
    "NUMBERS",
    "Band",
    "Card",
    "ClusterPlan",
    "Layout",
    "ModelShape",
    "UpdateTime",
    "Workload",
    "band_of",
    "cheapest",
    "checked_syncs",
    "checked_updates",
    "layout_name",
    "parse_parameters",
    "plan_cluster",
    "read_shape",
    "sweep",
    "typical_shape",
    "update_time",
]

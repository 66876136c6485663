"""A cost model of PPO on a cluster: formulas, constants, and published figures to check them against.

    python -m bench.cluster --parameters 8B --cards 64

Imports neither torch nor numpy. docs/ranks.md and RESULTS.md, here, are made from it.
"""

from bench.cluster.cards import CARDS, Card
from bench.cluster.check import Band, band_of, checked_syncs, checked_updates
from bench.cluster.cluster import ClusterPlan, plan_cluster
from bench.cluster.layouts import NUMBERS, cheapest, sweep
from bench.cluster.published import KINDS
from bench.cluster.report import layout_name
from bench.cluster.shape import ModelShape, parse_parameters, read_shape, typical_shape
from bench.cluster.update import UpdateTime, update_time
from bench.cluster.work import Layout, Workload

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

"""A run seen from another terminal or a browser while it is at work: read from its files, never touched."""

from kedge.report.watch.follower import Follower, Sight
from kedge.report.watch.frame import draw_frame
from kedge.report.watch.server import LivePage, PageServer

__all__ = ["Follower", "LivePage", "PageServer", "Sight", "draw_frame"]

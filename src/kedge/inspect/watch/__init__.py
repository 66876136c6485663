"""A run seen from another terminal or a browser while it is at work: read from its files, never touched."""

from kedge.inspect.watch.follower import Follower, Sight
from kedge.inspect.watch.frame import draw_frame
from kedge.inspect.watch.server import LivePage, PageServer

__all__ = ["Follower", "LivePage", "PageServer", "Sight", "draw_frame"]

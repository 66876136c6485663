"""Live views of a running run, on a terminal or in a browser, read from its files alone."""

from kedge.inspect.watch.follower import Follower, Snapshot
from kedge.inspect.watch.frame import draw_frame
from kedge.inspect.watch.server import LivePage, page_server

__all__ = ["Follower", "LivePage", "Snapshot", "draw_frame", "page_server"]

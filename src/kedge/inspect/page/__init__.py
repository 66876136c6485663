"""The run's page: what a run did, in one HTML file that opens anywhere."""

from kedge.inspect.page.assembly import Headline, ReportedRun, page_data
from kedge.inspect.page.document import MARKER, is_page, render_page
from kedge.inspect.page.frontier import Checkpoint

__all__ = ["MARKER", "Checkpoint", "Headline", "ReportedRun", "is_page", "page_data", "render_page"]

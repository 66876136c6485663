"""The run's page: what a run did, in one HTML file that opens anywhere."""

from kedge.report.page.assembly import Headline, ReportedRun, page_data
from kedge.report.page.document import MARKER, is_page, render_page
from kedge.report.page.frontier import Checkpoint

__all__ = ["MARKER", "Checkpoint", "Headline", "ReportedRun", "is_page", "page_data", "render_page"]

"""The report page: what runs did, in one self-contained HTML file."""

from kedge.inspect.page.assembly import Headline, ReportedRun, page_data
from kedge.inspect.page.document import MARKER, is_page, render_page
from kedge.inspect.page.frontier import FrontierPoint

__all__ = ["MARKER", "FrontierPoint", "Headline", "ReportedRun", "is_page", "page_data", "render_page"]

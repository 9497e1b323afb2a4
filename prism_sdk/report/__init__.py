"""Makes one self-contained HTML page of a trace. It analyses nothing: ``prism_sdk.analysis`` does.

timeline   the spans of one step of some ranks, reduced to what a screen shows
matrix     bytes between ranks, in at most 64 x 64 fields
content    everything that the page shows, as one JSON value
page       HTML, style, scripts and content in one file
assets/    the page's own files, and uPlot (MIT), which draws axes, lines and zooms
"""

from prism_sdk.report.content import report_content
from prism_sdk.report.page import write_report

__all__ = ["report_content", "write_report"]

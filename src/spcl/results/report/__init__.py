"""The HTML report: one self-contained file."""

from spcl.results.report.page import write_report

__all__ = ["write_report"]

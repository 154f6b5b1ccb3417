"""Results of runs: records, tables, figures and the report."""

from spcl.results.names import Published, PublishedResult, published
from spcl.results.records import RunRecord, read_runs

__all__ = ["Published", "PublishedResult", "RunRecord", "published", "read_runs"]

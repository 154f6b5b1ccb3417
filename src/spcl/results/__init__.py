"""What finished runs show: records, tables, figures, the report."""

from spcl.results.records import RunRecord, read_runs

__all__ = ["RunRecord", "read_runs"]

"""Results of runs: records, tables, figures and the report."""

from spcl.results.records import RunRecord, read_runs

__all__ = ["RunRecord", "read_runs"]

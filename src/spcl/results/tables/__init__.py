"""Tables of final accuracy and forgetting, with significance tests and the paper's numbers."""

from spcl.results.tables.build import ResultTable, make_tables

__all__ = ["ResultTable", "make_tables"]

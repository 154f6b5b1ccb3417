"""Tables of final accuracy and forgetting, with significance tests and the paper's numbers."""

from spcl.results.tables.tables import ResultTable, make_tables

__all__ = ["ResultTable", "make_tables"]

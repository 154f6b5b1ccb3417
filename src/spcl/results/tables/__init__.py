"""Tables of final accuracy and forgetting, with significance tests and the paper's numbers."""

from spcl.results.tables.build import make_tables
from spcl.results.tables.table import ResultTable

__all__ = ["ResultTable", "make_tables"]

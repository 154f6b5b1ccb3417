"""The paper's figures are found by name, and slow nobody down who draws none."""

import subprocess
import sys

PROGRAM = """
import sys
from spcl.results.names import method_order
method_order("er")
assert "spcl.paper.numbers" in sys.modules
assert "spcl.paper.figures" not in sys.modules
from spcl.results.figures import FIGURES, figure_spec
assert figure_spec("ablation").number == "Figure 3"
assert {"toy", "timeline"} <= set(FIGURES)
"""


def test_figures_are_loaded_when_one_is_asked_for() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)

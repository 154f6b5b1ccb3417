"""A first look: four methods on the embedded benchmark, compared in a table, figures and a report.

python examples/demo.py [FOLDER]     (make demo)
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

SPCL = str(Path(sys.executable).with_name("spcl"))


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    begin = time.monotonic()
    spcl("timeline", "--config", "4")
    for backbone, methods, scenarios in (
        ("mlp", "er,soro,spcl", "task,class"),
        ("cnn", "er,soro,soro+dbt,spcl", "task"),
    ):
        grid = f"grid --methods {methods} --scenarios {scenarios} --configs 4 --seeds 0 --jobs 2"
        spcl(*grid.split(), "--set", f"backbone={backbone}", "--out", str(out / backbone))
    spcl("table", str(out / "mlp"), str(out / "cnn"))
    for figure in ("learning-process", "gradients"):
        spcl("figure", figure, "--runs", str(out / "cnn"), "--out", str(out / "figures"))
    spcl("report", str(out / "mlp"), str(out / "cnn"), "--out", str(out / "report.html"))
    print(f"\nDone in {time.monotonic() - begin:.0f} s. Open {out / 'report.html'} in a browser.")


def spcl(*arguments: str) -> None:
    """Run a command, showing it first."""
    print(f"\n$ spcl {shlex.join(arguments)}", flush=True)
    subprocess.run([SPCL, *arguments], check=True)


if __name__ == "__main__":
    main()

"""Pack the complete runs of a grid into an archive: python results/pack.py GRID_FOLDER records.tar.gz [EVERY]

The archive holds what tables and figures need: settings, accuracies, losses and stability. It omits the confusion
tables, with EVERY the records of steps that are no multiples of it, and, of a published protocol, the label sets and
timelines, which belong to its publishers; those that were drawn stay. Unpacked, the runs are ordinary run folders.
"""

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Set
from pathlib import Path
from typing import Any

OMITTED = {"confusion"}
PUBLISHED = {"label_set", "class_names", "timeline"}
"""Content that belongs to the publishers of a protocol; the names of the classes of each task tell the label set."""


def main() -> None:
    """Write the archive named on the command line."""
    folder, out, every = Path(sys.argv[1]), Path(sys.argv[2]), int([*sys.argv, "1"][3])
    with gzip.GzipFile(out, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:  # type: ignore[arg-type]
        for result in sorted(folder.rglob("result.json")):
            run, name = result.parent, Path(folder.name) / result.parent.relative_to(folder)
            settings = json.loads((run / "settings.json").read_text())
            settings.pop("recorded_in", None)
            for path in ("protocol", "data_dir"):
                settings[path] = settings[path] and Path(settings[path]).name
            omitted = OMITTED if settings["protocol"] is None else OMITTED | PUBLISHED
            entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            steps = (entry for entry in entries if entry["kind"] != "step" or entry["step"] % every == 0)
            lines = [json.dumps(_kept(entry, omitted)) for entry in steps]
            _add(archive, name / "settings.json", json.dumps(settings, indent=2))
            _add(archive, name / "result.json", json.dumps(_kept(json.loads(result.read_text()), omitted), indent=1))
            _add(archive, name / "metrics.jsonl", "\n".join(lines) + "\n")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def _kept(content: dict[str, Any], omitted: Set[str]) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in content.items() if name not in omitted}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return value


def _add(archive: tarfile.TarFile, name: Path, text: str) -> None:
    entry = tarfile.TarInfo(str(name))
    entry.size = len(text.encode())
    archive.addfile(entry, io.BytesIO(text.encode()))


if __name__ == "__main__":
    main()

"""Pack the complete runs of a grid into an archive: python results/pack.py GRID_FOLDER records.tar.gz

The archive holds what tables and figures need: settings, accuracies, losses and stability. It omits the confusion
tables, and the label sets and timelines, which belong to the publishers of the protocol. Unpacked, the runs are
ordinary run folders.
"""

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

OMITTED = {"confusion", "label_set", "timeline"}


def main() -> None:
    """Write the archive named on the command line."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    with gzip.GzipFile(out, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:  # type: ignore[arg-type]
        for result in sorted(folder.rglob("result.json")):
            run, name = result.parent, Path(folder.name) / result.parent.relative_to(folder)
            settings = json.loads((run / "settings.json").read_text())
            for path in ("protocol", "data_dir"):
                settings[path] = settings[path] and Path(settings[path]).name
            lines = [json.dumps(_kept(json.loads(line))) for line in (run / "metrics.jsonl").read_text().splitlines()]
            _add(archive, name / "settings.json", json.dumps(settings, indent=2))
            _add(archive, name / "result.json", json.dumps(_kept(json.loads(result.read_text())), indent=1))
            _add(archive, name / "metrics.jsonl", "\n".join(lines) + "\n")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def _kept(content: dict[str, Any]) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in content.items() if name not in OMITTED}


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

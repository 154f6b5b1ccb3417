"""A killed service learns every batch exactly once: a short run of the benchmark that kills it more often."""

import subprocess
import sys
from pathlib import Path

from redis_process import needs_redis

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "serve_kills.py"


@needs_redis
def test_a_killed_service_learns_every_batch_exactly_once(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "6", "--redis-kills", "1", "--limit", "200"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 7

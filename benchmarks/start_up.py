"""How long a whole process takes, as a ratio to an empty Python: `python -c pass`.

The three commands run in turn, so that a change of the machine's speed meets all of them; each ratio is one of medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _config import LLAMA_8B
from _table import Figure, show

SOURCE = Path(__file__).parent.parent / "src"
ROUNDS = 41
INFER_LIMIT, TRAIN_LIMIT = 13.0, 28.0


def environment() -> dict[str, str]:
    """The caller's, with this source first; colours as in a pipe."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def seconds(command: Sequence[str]) -> float:
    """Wall time of one process."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    taken = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.decode()}")
    return taken


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(LLAMA_8B))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "memfit infer config.json --json": [sys.executable, "-m", "memfit", "infer", str(config), "--on", "4090", "--json"],
            "memfit train config.json": [sys.executable, "-m", "memfit", "train", str(config), "--on", "h100"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            seconds(command)  # writes the byte code
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(seconds(command))
    empty, infer, train = (statistics.median(measured) for measured in times.values())
    for name, measured in times.items():
        print(f"{name:32} median {1000 * statistics.median(measured):7.1f} ms   least {1000 * min(measured):7.1f} ms")
    print()
    return show(
        [
            Figure("infer --json / empty Python", infer / empty, INFER_LIMIT, "x"),
            Figure("train with its table / empty Python", train / empty, TRAIN_LIMIT, "x"),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())

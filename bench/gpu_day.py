"""A GPU's first half hour: the tests that need one, and then every figure.

    PYTHONPATH=. python -m bench.gpu_day [STAGE ...] [--out FOLDER]

Stages run one after the other, or those that are named. Each ends by itself in less than nine minutes or is stopped: a
fault of the queue would show as a hang. What has succeeded is left out when the command is called again. Writes what
each stage printed to `gpu-STAGE.log`, and what became of it to `gpu-day.json`; figures go to the same folder.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 530
"""Seconds that a stage may take."""
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=30"]
QUEUE = [f"tests/kernels/test_{name}.py" for name in ("queue", "statistics", "step_options", "absent_gradients")]
Stages = dict[str, list[list[str]]]


def stages(out: Path) -> Stages:
    """Returns the commands of each stage, without the interpreter of Python, most important stages first."""
    sanitizer = ["compute-sanitizer", "--tool", "racecheck", sys.executable, *PYTEST, QUEUE[0], "-k", "any_number"]
    found: Stages = {
        "queue": [[*PYTEST, *QUEUE], [*PYTEST, "-m", "gpu", "tests/kernels", "tests/optim", "tests/conformance"]],
        "twins": [[*PYTEST, "tests/kernels/test_twins.py", "tests/optim/test_capture.py", "tests/optim/test_costs.py"]],
        "sanitizer": [sanitizer],
        "quick": [["-m", "bench", "--gpu", "--quick", "--out", str(out / "quick")]],
        "sweep": [["-m", "bench.sweep", "--out", str(out / "gpu-sweep.jsonl"), "--seconds", "480"]],
        "full": [["-m", "bench", "--gpu", "--out", str(out)], ["-m", "bench.history", "--add", str(out)]],
        "training": [["-m", "bench.training", "--out", str(out)]],
    }
    if shutil.which(sanitizer[0]) is None:
        del found["sanitizer"]
    return found


def run(name: str, commands: list[list[str]], out: Path, limit: float = LIMIT) -> dict[str, Any]:
    """Runs the commands of a stage, of which a failed one does not stop the next, and returns what became of it."""
    begin, codes = time.monotonic(), []
    with (out / f"gpu-{name}.log").open("w") as log:
        for command in commands:
            whole = command if command[0] == "compute-sanitizer" else [sys.executable, *command]
            left = limit - (time.monotonic() - begin)
            try:
                done = subprocess.run(
                    whole, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=max(left, 1), check=False
                )
                codes.append(done.returncode)
            except subprocess.TimeoutExpired:
                codes.append("stopped")
    return {"stage": name, "exit": codes, "seconds": round(time.monotonic() - begin, 1)}


def main(given: list[str] | None = None) -> int:
    """Runs the stages; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(stages(Path()))}; all")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    out = options.out.resolve()
    every = stages(out)
    if unknown := set(options.stages) - set(every):
        parser.error(f"there is no stage {sorted(unknown)[0]!r}: choose from {', '.join(every)}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu-day.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in options.stages or every:
        if not any(found.get(name, {"exit": ["not run"]})["exit"]):
            print(f"{name}: done before")
            continue
        found[name] = run(name, every[name], out)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{name}: exit {found[name]['exit']}, {found[name]['seconds']} s, see {out / f'gpu-{name}.log'}", flush=True
        )
    return int(any(code for row in found.values() for code in row["exit"]))


if __name__ == "__main__":
    sys.exit(main())

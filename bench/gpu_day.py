"""Runs tests and measurements on a borrowed GPU, one stage a call.

    PYTHONPATH=. python -m bench.gpu_day STAGE [--out FOLDER] [--rehearsal]

A stage ends in less than nine minutes, or all of its processes are killed. Writes STAGE.log: the output of its
commands, with measurements as a JSON object a line, each written when it is measured.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import rows

ROOT = Path(__file__).parents[1]
PLUGINS = {"xdist": ["-n", "14"], "pytest_timeout": ["--timeout=100", "--timeout-method=thread"]}
"""Packages that may be missing, and options of theirs."""
TESTS = ["tests/kernels", "tests/optim", "tests/conformance"]
# without its cache PyTorch allocates each tensor separately, so that accesses beyond its end are detected
MEMCHECK = shlex.split("env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9")


class Stage(NamedTuple):
    """Commands that run in turn, and their time limit. A command runs also if the one before it failed."""

    seconds: float
    commands: list[list[str]]


def pytest(*tests: str, plugins: bool = True) -> list[str]:
    """Returns the command that runs tests, with a line for each."""
    more = [option for name, given in PLUGINS.items() if importlib.util.find_spec(name) for option in given]
    # a module that needs a package that is missing does not stop the others
    options = ["-vv", "--continue-on-collection-errors", "-W", "default", "-p", "no:cacheprovider", "-p", "bench.rows"]
    return [sys.executable, "-m", "pytest", *options, *(more if plugins else ()), *tests]


def stages(out: Path, rehearsal: bool) -> dict[str, Stage]:
    """Returns the stages, the most important first."""
    queue, statistics = (f"tests/kernels/test_{name}.py" for name in ("queue", "statistics"))
    smoke, tests = pytest(queue), pytest(*TESTS)
    memcheck = [*MEMCHECK, *pytest(queue, statistics, plugins=False)]
    if rehearsal:
        smoke = tests = memcheck = pytest(f"{queue}::test_carried_norms_equal_the_norms_of_the_weights", plugins=False)

    def bench(arguments: str, small: str = "--rehearsal") -> list[str]:
        words = [str(out) if word == "OUT" else word for word in arguments.split()]
        return [sys.executable, "-m", *words, *(small.split() if rehearsal else ())]

    # a small network does not fill a GPU
    study = "fused_lwlr study {0} --out {1}/{0} --jobs " + ("1 --quick --data digits" if rehearsal else "4 --seeds 10")
    names = ("lwlr-fashion",) if rehearsal else ("lwlr-fashion", "large-batch")
    studies = [[sys.executable, "-m", *study.format(name, out).split()] for name in names]
    return {
        "smoke": Stage(150, [smoke, bench("bench.stress")]),
        "tests": Stage(530, [tests]),
        "memcheck": Stage(530, [memcheck]),
        # the first command compiles kernels on all cores
        "bench": Stage(530, [[sys.executable, "-m", "bench.gate"], bench("bench --gpu --seconds 430 --out OUT")]),
        "ncu": Stage(530, [bench("bench.counters")]),
        "sweep": Stage(530, [bench("bench.sweep --seconds 460")]),
        "offload": Stage(120, [bench("bench.offload")]),
        "training": Stage(530, [bench("bench.training --out OUT", "--size quick")]),
        "studies": Stage(530, studies),
    }


def run(name: str, stage: Stage, out: Path) -> int:
    """Runs a stage; returns 0 if every command succeeded in time, else 1."""
    end, failed = time.monotonic() + stage.seconds, False
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (out / f"{name}.log").open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        packages = {found.name: found.version for found in importlib.metadata.distributions()}
        rows.write({"stage": name, "python": platform.python_version(), "packages": packages})
        for command in stage.commands:
            begin = time.monotonic()
            print(f"$ {shlex.join(command)}", flush=True)
            code = _run_group(command, log, end - begin)
            failed |= code != 0
            rows.write({"command": shlex.join(command), "exit": code, "seconds": round(time.monotonic() - begin, 1)})
    return int(failed)


def _run_group(command: list[str], log: Any, seconds: float) -> int | str:
    """Runs a command and kills its process group. Returns the exit code, or "killed"."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    except FileNotFoundError as error:
        return str(error)
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(given: list[str] | None = None) -> int:
    """Runs one stage; returns 1 if it failed."""
    parser = rows.command(__doc__, "--rehearsal")
    parser.add_argument("stage", choices=stages(Path(), False), metavar="STAGE", help=", ".join(stages(Path(), False)))
    parser.add_argument("--out", type=rows.folder, default=os.environ.get("OUT"), help="folder; by default $OUT")
    options = parser.parse_args(given)
    if options.out is None:
        parser.error("--out is missing: name a folder, or set the environment variable OUT")
    out = options.out.resolve()
    # asked to end, it still kills its processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(options.stage, stages(out, options.rehearsal)[options.stage], out)


if __name__ == "__main__":
    sys.exit(main())

"""One process of `launch.run`: the cases in a file, one after the other, as one rank of a process group."""

import faulthandler
import importlib
import os
import pickle
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# tests import modules from this folder and the bench
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch
import torch.distributed as dist
from setting import HAS_GPU

FOLDER, RANK, WORLD = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def main() -> None:
    assert not HAS_GPU
    with (FOLDER / "cases").open("rb") as file:
        cases = pickle.load(file)
    store = dist.FileStore(str(FOLDER / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=timedelta(minutes=10))
    reached()
    for number, case in enumerate(cases):
        started = time.monotonic()
        shared = FOLDER / f"case-{number}"
        shared.mkdir(exist_ok=True)
        os.chdir(shared)
        torch.manual_seed(0)
        try:
            run(case)
        except Exception:
            (FOLDER / f"error-{number}-{RANK}").write_text(traceback.format_exc())
            store.set(f"failed-{number}-{RANK}", "")
            try:
                # if it fails on all ranks alike, no rank waits for another
                store.wait([f"failed-{number}-{rank}" for rank in range(WORLD)], timedelta(seconds=5))
            except Exception:
                store.set("left", "")
                raise
            if store.check(["left"]):
                # it failed here because another rank failed and left: that rank reports the error, and this one ends
                time.sleep(60)
        print(f"{case.function}({case.arguments}) took {time.monotonic() - started:.2f} s", flush=True)
        reached()
    store.set(f"done-{RANK}", "")
    store.wait([f"done-{rank}" for rank in range(WORLD)], timedelta(minutes=2))


def run(case: Any) -> None:
    test = getattr(importlib.import_module(case.module.stem), case.function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message, category in case.ignored:
            warnings.filterwarnings("ignore", message, category)
        test(**case.arguments)


def reached() -> None:
    with (FOLDER / f"reached-{RANK}").open("ab") as log:
        log.write(b".")


if __name__ == "__main__":
    faulthandler.enable()
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # immediately: leaving the group could wait for ranks that never come, and gloo's threads may abort a process
        # that exits normally
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

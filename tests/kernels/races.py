"""Run the queue and the statistics natively under ThreadSanitizer: unchanged, and with one memory order weakened.

A separate script, which must be started with ThreadSanitizer's library loaded first. Its argument is an empty folder,
in which that library writes "log" files. Prints one line for each variant: the kernels, the number of the weakened
order or None, the original order, and the number of data races found.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import ctypes
import importlib

import torch
from tables import HYPER, RULES, change_sizes, make

from fused_lwlr import LAMB
from fused_lwlr.kernels import Gate, Row, triton
from fused_lwlr.kernels.native import build

FOLDER, THREADS = Path(sys.argv[1]), 6
# OpenMP's own threads wait for one another in ways that ThreadSanitizer does not see
PARALLEL = """
#include <pthread.h>
struct call { void (*function)(void *); void *data; pthread_barrier_t start; };
static void *one(void *argument) {
    struct call *call = argument;
    pthread_barrier_wait(&call->start);
    call->function(call->data);
    return 0;
}
void parallel(void (*function)(void *), void *data, unsigned count, unsigned flags) {
    pthread_t threads[count];
    struct call call = { function, data };
    pthread_barrier_init(&call.start, 0, count);
    for (unsigned i = 0; i < count; i++) pthread_create(&threads[i], 0, one, &call);
    for (unsigned i = 0; i < count; i++) pthread_join(threads[i], 0);
}
"""
ORDER = re.compile(r"(tt\.atomic_rmw \w+, )(acq_rel|acquire|release)")


class Patch:
    """Like pytest's monkeypatch, for the whole process."""

    setattr = staticmethod(setattr)


class Weakened:
    """The translator's source with one memory order removed."""

    def __init__(self):
        self.number, self.ttir, self.orders = None, build.ttir, []

    def __call__(self, source):
        text = self.ttir(source)
        self.orders = [match[2] for match in ORDER.finditer(text)]
        for number, match in enumerate(ORDER.finditer(text)):
            if number == self.number:
                return text[: match.start(2)] + "relaxed" + text[match.end(2) :]
        return text


def load_library(name, code, flags, key):
    number = len(list(FOLDER.iterdir()))
    c, library = FOLDER / f"{name}{number}.c", FOLDER / f"{name}{number}.so"
    c.write_text(code())
    subprocess.run(["gcc", "-O1", "-g", "-w", "-shared", "-fPIC", "-fsanitize=thread", c, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def table(operation):
    rows = [
        Row(i, scaled=i != 1, exponent=i % 2 * (operation == "sgd"), counts_for_max_norm=i % 2 == 1) for i in range(8)
    ]
    return make(operation, [(5,), *7 * [(20_000,)]], torch.float32, torch.device("cpu"), rows)


def queue():
    found, gate = table("sgd"), Gate(torch.ones(3, dtype=torch.float64), 3.0, skip=False)
    for _ in range(3):
        triton.step(RULES["sgd"], found, HYPER["sgd"], LAMB().factor_formula(RULES["sgd"]), gate)


def statistics():
    found = table("statistics")
    for _ in range(3):
        triton.statistics(found)


def races():
    return sum(path.read_text().count("WARNING: ThreadSanitizer: data race") for path in FOLDER.glob("log*"))


launch = importlib.import_module("fused_lwlr.kernels.triton.launch")
launch.MIN_NUMEL_OF_THREADS, launch.grid = 0, lambda programs: THREADS
change_sizes(Patch, block=128, queue_passes=1, statistics_passes=1, window=0)
torch.set_num_threads(THREADS)
build.load_library = load_library
parallel = load_library("parallel", lambda: PARALLEL, [], "")
build._parallel = lambda: ctypes.cast(parallel.parallel, ctypes.c_void_p).value
build.ttir = weakened = Weakened()
for work in (queue, statistics):
    weakened.number = None
    while weakened.number is None or weakened.number < len(weakened.orders):
        build._function.cache_clear()
        before = races()
        work()
        which = None if weakened.number is None else weakened.orders[weakened.number]
        print(work.__name__, weakened.number, which, races() - before, flush=True)
        weakened.number = 0 if weakened.number is None else weakened.number + 1

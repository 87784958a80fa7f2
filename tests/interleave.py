"""Programs of one launch that alternate as on a GPU, under Triton's interpreter, which runs one after another.

At every atomic operation the next program to run is drawn at random: programs overlap, wait for one another and
finish in any order. A deadlock shows as too many turns.
"""

import inspect
import random
import threading
from contextlib import contextmanager

from triton.runtime import interpreter

LIMIT = 200_000


class Turns:
    """Gives the turn to one of several threads at a time, one thread for each program."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.taken = 0
        self.switched = 0
        self.alive = []
        self.current = None
        self.ready = {}
        self.error = None

    def run(self, programs):
        """Run (grid index, function) pairs to their ends."""
        self.ready = {i: threading.Event() for i in range(len(programs))}
        self.alive = list(self.ready)
        self.index = [index for index, _ in programs]
        threads = [threading.Thread(target=self._one, args=(i, f), daemon=True) for i, (_, f) in enumerate(programs)]
        for thread in threads:
            thread.start()
        self._hand_on()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def turn(self):
        """Lets another program run with some probability, and waits for the next turn."""
        me = self.current
        self.taken += 1
        if self.taken > LIMIT:
            raise AssertionError("the programs wait for one another")
        self._hand_on()
        self._wait(me)

    def _one(self, me, function):
        try:
            self._wait(me)
            function()
        except BaseException as error:
            self.error = self.error or error
        self.alive.remove(me)
        if self.alive:
            self._hand_on()

    def _hand_on(self):
        before, self.current = self.current, self.random.choice(self.alive)
        self.switched += before != self.current
        self.ready[self.current].set()

    def _wait(self, me):
        self.ready[me].wait()
        self.ready[me].clear()
        if self.error is not None:
            raise SystemExit
        interpreter.interpreter_builder.set_grid_idx(*self.index[me])


@contextmanager
def interleaved(monkeypatch, seed):
    """Kernels launched within run with alternating programs; yields their counters."""
    turns = Turns(seed)
    builder = interpreter.interpreter_builder
    make, atomic = interpreter.GridExecutor.__init__, builder.create_atomic_rmw

    def init(self, fn, arg_names, grid, *rest, **more):
        make(self, _Collected(fn, grid[0], turns), arg_names, grid, *rest, **more)

    def yielding(*args, **kwargs):
        turns.turn()
        return atomic(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__init__", init)
        patch.setattr(builder, "create_atomic_rmw", yielding)
        yield turns


class _Collected:
    """A kernel that collects its programs until the last one is launched, and then runs them in turns."""

    def __init__(self, fn, count, turns):
        # attributes that the interpreter reads from a function
        self.__signature__, self.__annotations__ = inspect.signature(fn), fn.__annotations__
        self.__globals__, self.__name__ = fn.__globals__, fn.__name__
        self._fn, self._count, self._turns = fn, count, turns
        self._programs = []

    def __call__(self, **kwargs):
        self._programs.append((interpreter.interpreter_builder.grid_idx, lambda: self._fn(**kwargs)))
        if len(self._programs) == self._count:
            self._turns.run(self._programs)

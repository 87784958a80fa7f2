"""SIGTERM, SIGUSR1 and Ctrl-C end a run after the current step, with a checkpoint, on all ranks."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fused_lwlr.training.collectives import is_rank0, process_group

T = TypeVar("T")
Agree = Callable[[bool], tuple[bool, bool]]
"""A function with the arguments and results of `StopFlag.agree`."""

SIGNALS = [signal.SIGTERM, signal.SIGINT]
if hasattr(signal, "SIGUSR1"):
    SIGNALS.append(signal.SIGUSR1)  # the warning of Slurm before the end of a job's time
NOTICE = b"\nStopping after this step, with a checkpoint. (Ctrl-C once more ends the run at once, without.)\n"
IN_PREPARATION = b"\nStopping after this minibatch, without a checkpoint. (Ctrl-C once more ends the run at once.)\n"
"""While rates are measured, or GradInit runs."""


class StoppedError(Exception):
    """A signal came before the last batch of a validation, or of a preparation."""


class StopFlag:
    """Set by SIGTERM, SIGUSR1 or SIGINT within the block; asked after each optimizer step.

    A second SIGINT ends the process at once; further signals of the other kinds change nothing. The end of torchrun
    counts as SIGTERM: otherwise its processes would keep running. Under torch.distributed all ranks call `agree`.

    Attributes:
        signum: the first signal that came to this rank, or None.
        notice: what the first signal writes to standard error.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.notice = NOTICE
        self._agreed = 0
        self._before: dict[int, Any] = {}
        self._pid = 0
        # torchrun, if it started this process
        self._parent = os.getppid() if dist.is_torchelastic_launched() else None

    def __enter__(self) -> "StopFlag":
        self._pid = os.getpid()
        self._is_rank0 = is_rank0()
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            # None: one that was not set from Python, and cannot be
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agree(self, wanted: bool = False) -> tuple[bool, bool]:
        """Agree with all ranks on the next action, with one all-reduce of two numbers between their CPUs.

        Args:
            wanted: whether this rank has a checkpoint to write by its clock, or another batch to validate.

        Returns:
            Whether a signal came to any rank, and whether any rank wants it or all stop.
        """
        if self._parent is not None and os.getppid() != self._parent:
            self.signum = self.signum or signal.SIGTERM
        self._agreed, any_wanted = _highest(self.signum or 0, int(wanted))
        return self._agreed > 0, self._agreed > 0 or any_wanted > 0

    @property
    def exit_code(self) -> int:
        """The exit code on all ranks: 128 and the signal, as in shells (143 after SIGTERM), or 0 without one.

        It is not 0, because the run is not complete, and schedulers requeue by the exit code. torchrun itself exits
        with 1, and kills processes that still run after 30 s.
        """
        return 128 + self._agreed if self._agreed else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # forked within the block; Ctrl-C in a terminal, and SIGUSR1 from Slurm, come to all
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if self.signum is None:
            self.signum = number
            if self._is_rank0:
                # os.write and not print, which is not reentrant and may be interrupted here. In `... 2>&1 | tee log`
                # Ctrl-C has ended tee too
                with suppress(OSError):
                    os.write(2, self.notice)


def agree(wanted: bool) -> tuple[bool, bool]:
    """`StopFlag.agree` for runs without signals."""
    return False, _highest(int(wanted)) == [1]


def no_signals(wanted: bool) -> tuple[bool, bool]:
    """`agree` of this rank alone: ranks do not wait for one another."""
    return False, wanted


def until_stopped(batches: Iterable[T], agree: Agree) -> Iterator[T]:
    """Yields batches, and raises StoppedError if a rank asks for a stop. All ranks need the same number."""
    for batch in batches:
        if agree(True)[0]:
            raise StoppedError
        yield batch


def _highest(*numbers: int) -> list[int]:
    """The highest of each of the numbers over all ranks, by one all-reduce between their CPUs."""
    found = torch.tensor(numbers)
    group = process_group()
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    highest: list[int] = found.tolist()
    return highest

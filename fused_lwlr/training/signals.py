"""SIGTERM and Ctrl-C end a run after the step that it is in, with a checkpoint, on all ranks alike."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fused_lwlr.training.collectives import is_first, process_group

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTICE = b"\nStopping after this step, with a checkpoint. (Ctrl-C once more ends the run at once, without.)\n"


class StopFlag:
    """Set by SIGTERM or SIGINT within the block; asked after each optimizer step.

        with StopFlag() as flag:
            for batch in batches:
                ...
                stop, save = flag.agree(checkpoints.due())
                if save:
                    checkpoints.save(...)
                if stop:
                    break
        sys.exit(flag.exit_code)

    A second SIGINT ends the process at once; further SIGTERMs change nothing.

    Under torch.distributed it must be made on all ranks.

    Attributes:
        signum: the first signal that came to this process, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._agreed = 0
        self._group = process_group()
        self._before: dict[int, Any] = {}
        self._pid = 0

    def __enter__(self) -> "StopFlag":
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can be handled in the main thread alone: enter StopFlag there")
        self._pid = os.getpid()
        self._first = is_first()
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            # None: one that was not set from Python, and cannot be
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agree(self, checkpoint_due: bool = False) -> tuple[bool, bool]:
        """What all ranks do after this step: one all-reduce of two numbers between their CPUs.

        Args:
            checkpoint_due: whether it is time for a checkpoint by the clock of this rank.

        Returns:
            stop: a signal came to any rank.
            save: a checkpoint is due on any rank, or all stop.
        """
        mine = torch.tensor([self.signum or 0, int(checkpoint_due)])
        if self._group is not None:
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        self._agreed, due = mine.tolist()
        return self._agreed > 0, self._agreed > 0 or due > 0

    @property
    def exit_code(self) -> int:
        """What to exit with on all ranks: 143 after SIGTERM, 130 after SIGINT, as shells have it; 0 without a signal.

        Not 0, since the run is not done: schedulers that requeue do so by this. torchrun, whose processes end with it,
        exits with 1 itself; it kills what has not ended 30 s after the signal.
        """
        return 128 + self._agreed if self._agreed else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # forked within the block; Ctrl-C in a terminal comes to all
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if self.signum is None:
            self.signum = number
            if self._first:
                # print may not be called again while it runs, which may be now
                os.write(2, NOTICE)

"""The launcher of the other tests here: a failure on any rank is reported, and the next cases run."""

import os
import signal
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from launch import Case, run


def meet(rank_that="", does=""):
    """A sum over all ranks, before which one rank may fail."""
    if str(dist.get_rank()) == rank_that:
        if does == "warn":
            # warnings are errors
            warnings.warn("only here", UserWarning, stacklevel=1)
        if does == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if does == "hang":
            time.sleep(1000)
    count = torch.ones(())
    dist.all_reduce(count)
    assert count == dist.get_world_size() == 2


def case(rank_that="", does=""):
    return Case(Path(__file__), "meet", {"rank_that": rank_that, "does": does})


def test_failures_are_told_by_rank(tmp_path):
    """Also if the other rank waits for the failed one."""
    cases = [case(), case("1", "warn"), case("0", "die"), case("1", "hang"), case()]
    good, warned, died, hung, also_good = run(cases, 2, tmp_path, patience=12)
    assert not good
    assert not also_good
    assert "rank 1 failed" in warned
    assert "UserWarning: only here" in warned.split("rank 1 of 2, exit status 1:")[1]
    assert "rank 0 of 2, exit status -9" in died
    assert "nothing was finished for 12 s" in hung
    # the traceback shows the line that hung
    assert "in meet" in hung.split("rank 1 of 2, exit status -6:")[1]

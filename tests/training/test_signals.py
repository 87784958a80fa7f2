import os
import signal

import pytest

from fused_lwlr.training.signals import StopFlag

NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 128 + signal.SIGUSR1)]
)
def test_a_signal_stops_after_the_step_and_handlers_come_back(number, code, capfd):
    before = [signal.getsignal(n) for n in NUMBERS]
    with StopFlag() as flag:
        assert flag.agree() == (False, False)
        assert flag.agree(wanted=True) == (False, True)
        assert flag.exit_code == 0
        os.kill(os.getpid(), number)
        assert flag.signum == number
        assert flag.agree() == (True, True)
    assert flag.exit_code == code
    assert [signal.getsignal(n) for n in NUMBERS] == before
    assert capfd.readouterr().err.count("Stopping after this step") == 1


def test_more_of_sigterm_change_nothing_and_the_first_signal_counts(capfd):
    with StopFlag() as flag:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert flag.agree() == (True, True)
    assert flag.exit_code == 143
    assert capfd.readouterr().err.count("Stopping") == 1


def test_handlers_come_back_after_an_exception():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), StopFlag():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


def in_a_child(what):
    """The signal that ended a forked process, and its exit status, 7 unless another one is meant."""
    child = os.fork()
    if child == 0:
        try:
            what()
        finally:
            os._exit(7)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status), os.WEXITSTATUS(status)


# a fork of a process with threads is fine as long as the child does so little
forked = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@forked
@pytest.mark.parametrize(("numbers", "end"), [
    ([signal.SIGINT], (0, 7)), ([signal.SIGTERM] * 3, (0, 7)), ([signal.SIGINT] * 2, (signal.SIGINT, 0)),
    ([signal.SIGTERM, signal.SIGINT, signal.SIGINT], (signal.SIGINT, 0)), ([signal.SIGUSR1] * 2, (0, 7)),
])  # fmt: skip
def test_the_second_ctrl_c_ends_the_process(numbers, end):
    def run():
        with StopFlag():
            for number in numbers:
                os.kill(os.getpid(), number)

    assert in_a_child(run) == end


@forked
@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, (signal.SIGTERM, 0)), (signal.SIGINT, (0, 7)), (signal.SIGUSR1, (0, 7))]
)
def test_forked_processes_leave_other_signals_to_their_parent(number, end):
    with StopFlag() as flag:
        assert in_a_child(lambda: os.kill(os.getpid(), number)) == end
        assert flag.agree() == (False, False)


@pytest.mark.parametrize(("launched", "stops"), [(True, True), (False, False)])
def test_the_end_of_torchrun_counts_as_sigterm(launched, stops, monkeypatch):
    """A shell or another parent may end, as with nohup."""
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with StopFlag() as flag:
        assert flag.agree() == (False, False)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert flag.agree() == (stops, stops)
    assert flag.exit_code == (143 if stops else 0)

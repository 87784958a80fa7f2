"""Hugging Face Accelerate with our optimizers and with torch's."""

import pytest
import torch
from steps import OPTIONS, OURS, TORCH, identical
from tolerances import same
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from fused_lwlr import ELR, LAMB, ELRRecorder

pytestmark = pytest.mark.long
EPOCHS = 2


@pytest.fixture
def accelerate(third_party):
    package = third_party("accelerate")

    def forget():
        package.state.AcceleratorState._reset_state(reset_partial_state=True)
        package.state.GradientState._reset_state()

    # the settings are global to the process until they are reset
    forget()
    yield package
    forget()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def loader():
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.rand(20, 6, generator=generator), torch.arange(20) % 3)
    return torch.utils.data.DataLoader(data, batch_size=4)


class Run:
    """The training loop of a script with Accelerate."""

    def __init__(self, accelerate, make_optimizer, *, clip=None, **settings):
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        model = network()
        optimizer = make_optimizer(model.named_parameters())
        self.model, self.optimizer, self.batches, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader(), ExponentialLR(optimizer, 0.8)
        )
        self.clip = clip
        self.norms = []

    def epoch(self):
        for x, target in self.batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), target))
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def result(self):
        return [p.detach() for p in self.model.parameters()], self.optimizer.state_dict()["state"]


def check(run, other):
    """Parameters and state, bit for bit."""
    (params, state), (others, its_state) = run.result(), other.result()
    for p, q in zip(params, others, strict=True):
        same(p, q)
    assert identical(state, its_state)
    assert run.scheduler.get_last_lr() == other.scheduler.get_last_lr()
    assert not identical(params, [p.detach() for p in network().parameters()])


@pytest.mark.parametrize(
    ("name", "accumulation", "clip", "mixed_precision"),
    [("sgd", 1, None, "no"), ("sgd", 3, 0.1, "bf16"), ("adamw", 1, 0.1, "bf16"), ("adamw", 3, None, "no")],
)
@pytest.mark.usefixtures("torchs_bits")
def test_prepared(name, accumulation, clip, mixed_precision, accelerate):
    """The wrapper takes no step while gradients accumulate; five batches are not a multiple of three."""
    settings = {"gradient_accumulation_steps": accumulation, "mixed_precision": mixed_precision, "clip": clip}
    ours = Run(accelerate, lambda named: OURS[name](named, **OPTIONS[name]), **settings)
    torchs = Run(accelerate, lambda named: TORCH[name](named, **OPTIONS[name], foreach=False), **settings)
    for run in (ours, torchs):
        for _ in range(EPOCHS):
            run.epoch()
    assert type(ours.optimizer.optimizer) is OURS[name]
    check(ours, torchs)
    assert ours.norms == torchs.norms
    assert clip is None or max(ours.norms) > clip
    if name == "adamw":
        taken = [state["step"].item() for state in ours.result()[1].values()]
        assert taken == [EPOCHS * -(-5 // accumulation)] * 6


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.9, "scaling": ELR(0.1), "nonfinite": "skip"}),
        ("adamw", {"amsgrad": True, "scaling": LAMB(), "clip_global_norm": 0.1, "nonfinite": "raise"}),
    ],
)  # fmt: skip
def test_resumed(name, options, mixed_precision, accelerate, tmp_path):
    """`save_state` and `load_state`: the same bits as a run that was not interrupted; with its multipliers."""
    etas = {"0.weight": 0.25, "3.weight": 2.0}

    def run_with(multipliers):
        return Run(
            accelerate,
            lambda named: OURS[name](named, lr=0.05, **options, layers=multipliers),
            gradient_accumulation_steps=2,
            mixed_precision=mixed_precision,
        )

    whole = run_with(etas)
    whole.epoch()
    whole.accelerator.save_state(str(tmp_path))
    whole.epoch()
    again = run_with(None)
    again.accelerator.load_state(str(tmp_path))
    again.epoch()
    check(again, whole)
    assert [entry[0].options.eta for entry in again.optimizer.param_groups[0]["layers"]] == [0.25, 1, 1, 1, 2, 1]


@pytest.mark.parametrize(("accumulation", "steps"), [(1, (0, 1, 2, 3, 4)), (3, (0, 1))])
@pytest.mark.parametrize("optimizers", [OURS, TORCH])
def test_effective_learning_rates_are_recorded(optimizers, accumulation, steps, accelerate):
    """Each step of the optimizer that `prepare` returns gets a record."""
    run = Run(accelerate, lambda named: optimizers["sgd"](named, lr=0.05), gradient_accumulation_steps=accumulation)
    recorder = ELRRecorder(run.model).watch(run.optimizer)
    run.epoch()
    assert recorder.history.steps == steps

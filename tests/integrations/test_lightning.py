"""The Trainer of PyTorch Lightning with our optimizers and with torch's."""

import importlib.util
from functools import partial

import pytest
import torch
from cases import every_name
from steps import OPTIONS, OURS, TORCH
from tolerances import same
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from fused_lwlr import ELR, LAMB

# warnings of Lightning's own code, and its advice on data-loading workers
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]
EPOCHS = 2
BATCHES = 4


@pytest.fixture(scope="module")
def lightning(third_party):
    # one package with two names
    return third_party("lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning")


@pytest.fixture
def module(lightning):
    """A small network that trains with the optimizer that a given function makes; the same network each time."""

    class Module(lightning.LightningModule):
        def __init__(self, make_optimizer, manual, every_step):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
            self.make_optimizer = make_optimizer
            self.automatic_optimization = not manual
            self.every_step = every_step
            self.losses = []

        def configure_optimizers(self):
            optimizer = self.make_optimizer(self.named_parameters())
            if not self.every_step:
                return [optimizer], [ExponentialLR(optimizer, 0.5)]
            scheduler = OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * BATCHES + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch, at):
            x, target = batch
            loss = nn.functional.cross_entropy(self.net(x), target)
            self.losses.append(loss.item())
            if self.automatic_optimization:
                return loss
            # accumulates over two batches
            optimizer = self.optimizers()
            self.manual_backward(loss / 2)
            if at % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()
            return None

        @property
        def optimizer(self):
            return self.trainer.optimizers[0]

    def make(make_optimizer, *, manual=False, every_step=True):
        return Module(make_optimizer, manual, every_step)

    return make


@pytest.fixture
def fit(lightning, tmp_path):
    def run(module, *, max_epochs=EPOCHS, save=False, ckpt_path=None, **options):
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=max_epochs, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path, **options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(4 * BATCHES, 6, generator=generator)
        data = torch.utils.data.TensorDataset(x, torch.arange(4 * BATCHES) % 3)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
        if save:
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        return tmp_path / "half.ckpt"

    return run


def check(module, other, check=same):
    """Parameters, state, rates, and the options that the scheduler changes."""
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        check(p.detach(), q.detach())
    state, others = (m.optimizer.state_dict()["state"] for m in (module, other))
    assert state.keys() == others.keys()
    for key, entries in state.items():
        # with a loss scale, SGD's steps are counted on the device too
        assert entries.keys() - {"step"} == others[key].keys() - {"step"}
        for name, value in others[key].items():
            check(entries[name], value)
    for group, its in zip(module.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        assert (group["lr"], group.get("momentum"), group.get("betas")) == (
            its["lr"], its.get("momentum"), its.get("betas")
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "every_step"),
    [
        ("sgd", {}, True), ("adamw", {"gradient_clip_val": 0.1}, False),
        ("sgd", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, False),
        ("adamw", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}, True),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("torchs_bits")
def test_automatic_optimization(name, options, every_step, module, fit):
    """Lightning gives `step` a closure that does forward, backward and clipping."""
    ours = module(lambda named: OURS[name](named, **OPTIONS[name]), every_step=every_step)
    torchs = module(lambda named: TORCH[name](named, **OPTIONS[name], foreach=False), every_step=every_step)
    for m in (ours, torchs):
        fit(m, **options)
    assert type(ours.optimizer) is OURS[name]
    check(ours, torchs)
    assert ours.losses == torchs.losses
    assert len(set(ours.losses)) == EPOCHS * BATCHES


@every_name
@pytest.mark.usefixtures("torchs_bits")
def test_manual_optimization(name, module, fit):
    ours = module(lambda named: OURS[name](named, **OPTIONS[name]), manual=True)
    torchs = module(lambda named: TORCH[name](named, **OPTIONS[name], foreach=False), manual=True)
    for m in (ours, torchs):
        fit(m)
    check(ours, torchs)
    assert ours.losses == torchs.losses
    assert ours.losses[0] != ours.losses[BATCHES]


@every_name
@pytest.mark.usefixtures("torchs_bits")
def test_float16_with_loss_scaling(name, module, fit, lightning):
    """The scale is a power of two, and too large at first: some steps are skipped."""
    runs, scalers = [], []
    for optimizer_class, more in ((OURS[name], {}), (TORCH[name], {"foreach": False})):
        runs.append(module(partial(optimizer_class, **OPTIONS[name], **more), every_step=False))
        scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0**20))
        precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scalers[-1])
        fit(runs[-1], plugins=precision)
    check(*runs)
    assert runs[0].losses == runs[1].losses
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**20
    assert runs[0].losses[0] != runs[0].losses[BATCHES]


def test_clipping_between_scaling_and_step_is_refused(module, fit, lightning):
    """Lightning clips before the step, which unscales: as with torch's fused=True, use `clip_global_norm` instead."""
    ours = module(partial(OURS["sgd"], lr=0.1), every_step=False)
    precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(ours, gradient_clip_val=0.1, plugins=precision)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.9, "scaling": ELR(0.1), "nonfinite": "skip"}),
        ("adamw", {"amsgrad": True, "scaling": LAMB(), "clip_global_norm": 0.1, "nonfinite": "raise"}),
    ],
)  # fmt: skip
def test_resumed(name, options, manual, module, fit):
    """The same bits as a run that was not interrupted; multipliers come from the checkpoint."""
    etas = {"net.0.weight": 0.25, "net.3.weight": 2.0}

    def module_with(multipliers):
        return module(lambda named: OURS[name](named, lr=0.05, **options, layers=multipliers), manual=manual)

    whole, half, again = module_with(etas), module_with(etas), module_with(None)
    fit(whole)
    checkpoint = fit(half, max_epochs=1, save=True)
    fit(again, ckpt_path=checkpoint)
    check(again, whole)
    assert again.losses == whole.losses[BATCHES:]
    assert [entry[0].options.eta for entry in again.optimizer.param_groups[0]["layers"]] == [0.25, 1, 1, 1, 2, 1]

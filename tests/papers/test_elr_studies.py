"""The studies elr-spread and elr-constrained: smoke tests through the command, and a training by hand beside each."""

import numpy as np
import pytest
import torch
from test_lwlr_studies import COMMON, CPU, quick, spread
from torch.nn.functional import cross_entropy

from fused_lwlr.data.datasets import Batches, digits
from fused_lwlr.models.deep import deepnet
from fused_lwlr.papers import Result, Results, cell
from fused_lwlr.papers.elr_constrained import nets as constrained_nets
from fused_lwlr.papers.elr_constrained_report import minus, top
from fused_lwlr.papers.elr_spread import measure
from fused_lwlr.papers.elr_spread import nets as spread_nets
from fused_lwlr.papers.elr_spread_report import ranks, ratios
from fused_lwlr.papers.from_he import FromHe
from fused_lwlr.training.small_loop import Config


def test_spread(tmp_path):
    (plain, momentum, said), jobs = quick("elr-spread", tmp_path, "--model", "noshort8x2")
    assert [(row["net"], row["lr"]) for row in plain] == [
        ("resnet8x2", "0.01"), ("resnet8x2", "1"), ("noshort8x2", "0.01"), ("noshort8x2", "1"),
    ]  # fmt: skip
    values = {
        (p["model"], p["momentum"], p["lr"], p["seed"]): job["values"] for job in jobs for p in [job["parameters"]]
    }
    found = [values["noshort8x2", 0.0, 0.01, seed]["test_accuracy"] for seed in (0, 1)]
    assert plain[2]["test accuracy %"] == spread(found, 1)
    assert [row["momentum"] for row in momentum] == ["0", "0", "0.9", "0.9"]
    low, high = ([values["resnet8x2", 0.0, lr, seed]["elr_spread"] for seed in (0, 1)] for lr in (0.01, 1.0))
    assert said[0]["here"] == spread(np.array(low) / high, 2)
    assert said[0]["paper"] == "above 1"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_spread_is_that_of_a_training_by_hand(momentum):
    found = measure(model="noshort8x2", momentum=momentum, lr=0.1, seed=1, **COMMON)
    model = deepnet("noshort8x2", image_size=8, channels=1, classes=10)
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    torch.manual_seed(1)
    for weight in (*weights, model.head.weight):
        torch.nn.init.normal_(weight, std=(2 / weight[0].numel()) ** 0.5)
    torch.nn.init.zeros_(model.head.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    total = len(list(Batches(digits().train, 64, CPU, seed=1)))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    spreads, of_gradients = [], []
    for x, y in Batches(digits().train, 64, CPU, seed=1):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        norms = np.array([w.detach().norm().item() for w in weights])
        of_gradients.append(np.std([w.grad.norm().item() for w in weights] / norms))
        optimizer.step()
        schedule.step()
        used = [optimizer.state[w]["momentum_buffer"] if momentum else w.grad for w in weights]
        spreads.append(np.std([g.norm().item() for g in used] / norms))
    assert found["elr_spread"] == pytest.approx(np.mean(spreads), rel=1e-4)
    assert found["base_spread"] == pytest.approx(np.mean(of_gradients), rel=1e-4)
    assert found["spread"] == pytest.approx(spreads[:: found["steps"][1]], rel=1e-3)


def test_spread_of_what_diverges():
    found = measure(model="noshort8x2-nobn", momentum=0.0, lr=1e12, seed=0, **COMMON)
    assert set(found.values()) == {None}
    assert cell([found["elr_spread"], 1.0]) == "1.000 (1 of 2 diverged)"


def test_constrained(tmp_path):
    (best, differences, rates), jobs = quick("elr-constrained", tmp_path, "--model", "noshort8x2")
    assert [(row["SGD with"], row["warm-up"]) for row in best] == [
        (setup, warm) for setup in ("momentum, decay", "neither", "constrained") for warm in ("no", "yes")
    ]
    of = {(p["setup"], p["warmup"], p["seed"]): job["values"] for job in jobs for p in [job["parameters"]]}
    found = [of["constrained", 0.0, seed]["test_accuracy"] for seed in (0, 1)]
    assert best[4]["test accuracy %"] == spread(found, 1)
    assert (best[4]["paper: Figure 8"], best[0]["paper: Figure 8"]) == ("73.9", "34.0 at most")
    change = [of["constrained", 0.1, seed]["test_accuracy"] - found[seed] for seed in (0, 1)]
    assert differences[-1]["here"] == f"{np.mean(change):+.1f} ± {np.std(change, ddof=1):.1f}"
    assert len(rates) == 3


def test_constrained_step_by_hand():
    """Eq. 14, and all weights divided by the largest norm before the step, with running statistics along."""
    goal, lr = 0.05, 0.3
    config = Config(model="noshort8x2", rates="single", lr=lr, momentum=0.0, weight_decay=0.0, scaling="elr", goal=goal,
                    warmup=0.0, epochs=1, seed=3, device="cpu")  # fmt: skip
    training = FromHe(config)
    before = {name: param.detach().clone() for name, param in training.model.named_parameters()}
    x, y = next(iter(Batches(digits().train, 64, CPU, seed=3)))
    cross_entropy(training.model(x), y).backward()
    gradients = {name: param.grad.clone() for name, param in training.model.named_parameters()}
    training.optimizer.step()
    largest = max(w.norm() for w in before.values() if w.dim() == 4)
    for name, param in training.model.named_parameters():
        w, g = before[name], gradients[name]
        if w.dim() == 4:
            w, g = w / largest, g * largest
            g = g * goal / (g.norm() / w.norm() + 1e-5)
        torch.testing.assert_close(param.detach(), w - lr * g, rtol=1e-4, atol=1e-6)


def test_best_rate():
    results = Results([
        Result(f"{lr}-{seed}", {"lr": lr, "goal": None, "seed": seed}, {"test_accuracy": accuracy}, 0.0)
        for lr, accuracies in ((0.1, (50.0, 60.0)), (0.3, (90.0, None)), (1.0, (None, None)))
        for seed, accuracy in enumerate(accuracies)
    ])  # fmt: skip
    assert top(results).distinct("lr") == [0.1]
    assert minus(results.where(lr=0.3), results.where(lr=0.1)) == [40.0, None]


def test_statements():
    assert ratios([2.0, None, 1.0], [4.0, 1.0, 0.0]) == [0.5, None, None]
    assert ranks([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    # one tie: 1 − 6 Σd² / (n (n² − 1)) does not hold, the correlation of mean ranks does
    assert ranks([(1, 1), (1, 2), (2, 3)]) == pytest.approx(3**0.5 / 2)


def test_names_of_nets():
    assert spread_nets(None)[:2] == ["resnet32x8", "noshort32x8"]
    assert spread_nets("noshort56")[::2] == ["resnet56", "resnet56-noaffine", "resnet56-nobn"]
    assert constrained_nets("resnet110") == ["noshort110", "resnet110"]
    assert constrained_nets(None) == ["noshort", "short"]
    assert spread_nets("timm:resnet50") == constrained_nets("timm:resnet50") == ["timm:resnet50"]

"""Param groups, schedulers and Lookahead of timm, on our optimizers and on torch's."""

import pytest
from small_vit import load, vit_twins
from steps import OPTIONS, OURS, TORCH, compare, saved, train
from tolerances import same

STEPS = 8
DECAY = 0.1
GROUPS = {
    "weight_decay": lambda timm, model: timm.optim.param_groups_weight_decay(
        model, DECAY, no_weight_decay_list=model.no_weight_decay()
    ),
    "layer_decay": lambda timm, model: timm.optim.param_groups_layer_decay(model, DECAY, layer_decay=0.6),
    "layer_decay, the first layers left out": lambda timm, model: timm.optim.param_groups_layer_decay(
        model, DECAY, layer_decay=0.5, min_scale=0.2, no_opt_scale=0.3
    ),
}
# number of different rate scales in these groups
SCALES = {"weight_decay": 1, "layer_decay": 3, "layer_decay, the first layers left out": 2}
# each warms up for 2 steps and changes again within STEPS
SCHEDULES = {
    "cosine": {"num_epochs": 5, "cycle_limit": 2, "cycle_decay": 0.5},
    "tanh": {"num_epochs": 6},
    "step": {"decay_epochs": 3, "decay_rate": 0.3},
    "multistep": {"decay_milestones": [3, 6], "decay_rate": 0.3},
    "poly": {"num_epochs": 7, "decay_rate": 0.9},
    "wsd": {"num_epochs": 7, "decay_epochs": 3},
}


@pytest.fixture(scope="module", autouse=True)
def timm(timm):
    load(timm)
    return timm


@pytest.fixture
def twins(timm, device):
    return vit_twins(timm, device, depth=1)


def schedule(timm, optimizers, sched):
    return [
        timm.scheduler.create_scheduler_v2(
            optimizer, sched, warmup_epochs=2, warmup_lr=0.001, min_lr=0.0005, **SCHEDULES[sched]
        )[0]
        for optimizer in optimizers
    ]


def options_of(name):
    return {key: value for key, value in OPTIONS[name].items() if key != "weight_decay"}


def learned(model):
    return [(key, p) for key, p in model.named_parameters() if p.requires_grad]


def train_on(optimizers, twins, schedulers, epochs):
    """The rates of each optimizer's groups at each step."""
    rates = []
    for epoch in epochs:
        rates.append(tuple([group["lr"] for group in optimizer.param_groups] for optimizer in optimizers))
        train(optimizers, [learned(model) for model in twins], 1)
        for scheduler in schedulers:
            scheduler.step(epoch + 1, metric=1.0)
    return rates


# every schedule with AdamW and layer decay, and all groups with one of them; fast tests leave the other pairs out
@pytest.mark.parametrize(
    ("name", "grouping", "sched"),
    [pytest.param(name, grouping, sched,
                  marks=() if sched == "cosine" or (name, grouping) == ("adamw", "layer_decay") else pytest.mark.long)
     for name in OURS for grouping in GROUPS for sched in SCHEDULES],
)  # fmt: skip
def test_groups_of_timm(name, grouping, sched, timm, twins):
    """`lr_scale`, which timm's schedulers multiply rates with, stays with its group; also through a checkpoint."""
    groups = [GROUPS[grouping](timm, model) for model in twins]
    ours = OURS[name](groups[0], **options_of(name), backend="torch")
    torchs = TORCH[name](groups[1], **options_of(name), foreach=False)
    schedulers = schedule(timm, (ours, torchs), sched)
    rates = train_on((ours, torchs), twins, schedulers, range(4))
    state = saved(ours.state_dict())
    ours = OURS[name](GROUPS[grouping](timm, twins[0]), **options_of(name), backend="torch")
    schedulers[0] = schedule(timm, (ours,), sched)[0]
    schedulers[0].load_state_dict(schedulers[1].state_dict())
    ours.load_state_dict(state)
    rates += train_on((ours, torchs), twins, schedulers, range(4, STEPS))
    compare(same, ours, torchs, *map(learned, twins))
    scales = [group.get("lr_scale") for group in ours.param_groups]
    assert scales == [group.get("lr_scale") for group in torchs.param_groups]
    assert len(set(scales)) == (SCALES[grouping])
    assert all(at == its for at, its in rates)
    assert len({tuple(at) for at, _ in rates}) > 3

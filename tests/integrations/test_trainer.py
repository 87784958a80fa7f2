"""The Trainer of Hugging Face transformers with our optimizers and with torch's."""

import pytest
import torch
from steps import OPTIONS, OURS, TORCH, identical
from tolerances import same

from fused_lwlr import LAMB, LARS

pytestmark = pytest.mark.long
STEPS = 6


@pytest.fixture(scope="module")
def transformers(third_party):
    return third_party("transformers")


@pytest.fixture
def model(transformers):
    """A minimal BERT; the same one each time."""

    def make():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=8, num_labels=3,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)

    return make


@pytest.fixture
def trainer(transformers, tmp_path):
    """A Trainer on random sentences."""
    tokens = torch.randint(20, (24, 6))
    data = [{"input_ids": row, "labels": row.sum() % 3} for row in tokens]

    def make(model, trainer_class=transformers.Trainer, *, optimizer=None, folder="run", arguments=None, **options):
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2,
            report_to="none", disable_tqdm=True, logging_strategy="no", warmup_steps=2, learning_rate=0.01,
            weight_decay=0.1, **(arguments or {"save_strategy": "no"}),
        )  # fmt: skip
        if optimizer is not None:
            # None: the linear schedule of the Trainer
            options["optimizers"] = (optimizer, None)
        return trainer_class(model=model, args=args, train_dataset=data, **options)

    return make


def check(actual, expected, model, other, check=same):
    """Parameters, and state in the form of `state_dict()`."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        check(p.detach(), q.detach())
    a, b = actual.state_dict(), expected.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        assert state.keys() == b["state"][key].keys()
        for name, value in state.items():
            check(value, b["state"][key][name])
    assert [group["lr"] for group in a["param_groups"]] == [group["lr"] for group in b["param_groups"]]


def options_of(name):
    return {key: value for key, value in OPTIONS[name].items() if key != "weight_decay"}


def given(trainer, make, model, optimizer_class, options, arguments):
    return trainer(model, optimizer=optimizer_class(model.parameters(), **options), arguments=arguments)


def named_class(trainer, make, model, optimizer_class, options, arguments):
    """The groups of the Trainer: with weight decay and without."""
    return trainer(model, optimizer_cls_and_kwargs=(optimizer_class, options), arguments=arguments)


def overridden(trainer, make, model, optimizer_class, options, arguments):
    class OwnTrainer(make.Trainer):
        def create_optimizer(self, *args):
            self.optimizer = optimizer_class(self.model.named_parameters(), **options)
            return self.optimizer

    return trainer(model, OwnTrainer, arguments=arguments)


@pytest.mark.parametrize("way", [given, named_class, overridden])
@pytest.mark.parametrize(("name", "accumulation", "max_grad_norm"), [("sgd", 1, 0.05), ("adamw", 2, 0.0)])
@pytest.mark.usefixtures("torchs_bits")
def test_trainer(name, way, accumulation, max_grad_norm, transformers, trainer, model):
    arguments = {
        "gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm, "save_strategy": "no"
    }  # fmt: skip
    models, optimizers = [], []
    for optimizer_class, more in ((OURS[name], {}), (TORCH[name], {"foreach": False})):
        models.append(model())
        run = way(trainer, transformers, models[-1], optimizer_class, {**options_of(name), **more}, arguments)
        assert run.train().global_step == STEPS
        optimizers.append(run.optimizer)
    assert type(getattr(optimizers[0], "optimizer", optimizers[0])) is OURS[name]
    check(*optimizers, *models)
    assert not identical(list(models[0].parameters()), list(model().parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.9, "scaling": LARS(0.1), "nonfinite": "skip"}),
        ("adamw", {"amsgrad": True, "scaling": LAMB(), "clip_global_norm": 0.1, "nonfinite": "skip"}),
    ],
)  # fmt: skip
def test_resumed(name, options, trainer, model):
    """The same bits as a run that was not interrupted; multipliers come from the checkpoint."""
    etas = {"bert.embeddings.word_embeddings.weight": 0.25, "classifier.weight": 3.0}
    saves = {"save_strategy": "steps", "save_steps": 3}

    def optimizer_of(module, **more):
        return OURS[name](module.named_parameters(), lr=0.05, **options, **more)

    straight, resumed = model(), model()
    whole = trainer(straight, optimizer=optimizer_of(straight, layers=etas), arguments=saves)
    whole.train()
    again = trainer(resumed, optimizer=optimizer_of(resumed), folder="again")
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    check(whole.optimizer, again.optimizer, straight, resumed)
    assert again.optimizer.state_dict()["param_groups"][0]["layers"] is not None

import pytest

from fused_lwlr.data.files import json_values
from fused_lwlr.training.config_diff import FINGERPRINT, check_config, difference

OLD = {"lr": 0.1, "model": "resnet50", "crops": [1, 2], "ema": None, "out": "a"}
ROWS = [
    ({}, [], []),
    ({"lr": 0.2}, [], ["lr: 0.1 -> 0.2"]),
    ({"lr": 0.1 + 1e-18}, [], []),
    # as JSON has them
    ({"crops": (1, 2)}, [], []),
    ({"crops": [2, 1]}, [], ["crops: [1, 2] -> [2, 1]"]),
    ({"crops": [2, 1], "lr": 0.2}, ["crops"], ["lr: 0.1 -> 0.2"]),
    ({"crops": [2, 1]}, ["crops"], []),
    ({"crops_too": 1}, ["crops"], ["crops_too: (absent) -> 1"]),
    ({"crops": None}, [], ["crops: [1, 2] -> null"]),
    # an option of a later version, at its default
    ({"new": None}, [], []),
    ({"ema": 0.999}, [], ["ema: null -> 0.999"]),
    ({"out": "b", "model": "vit"}, ["out"], ["model: resnet50 -> vit"]),
    ({"lr": 1}, [], ["lr: 0.1 -> 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "free", "lines"), ROWS)
def test_difference(change, free, lines):
    assert difference(OLD, {**OLD, **change}, free=free) == lines


def test_a_field_that_is_gone():
    assert difference(OLD, {key: value for key, value in OLD.items() if key != "lr"}) == ["lr: 0.1 -> (absent)"]


def test_the_refusal_lists_free_fields_and_how_to_resume():
    # label smoothing may be an option of a later version
    check_config(OLD, {**OLD, "out": "b", "world_size": 2, "label_smoothing": 0.0}, where="runs/a")
    with pytest.raises(ValueError, match="runs/a belongs to a run with other options") as caught:
        check_config(OLD, {**OLD, "out": "b", "lr": 0.2, "label_smoothing": 0.1}, where="runs/a")
    *lines, last = str(caught.value).splitlines()
    assert lines == [
        "runs/a belongs to a run with other options:",
        "  --label-smoothing: 0.0 -> 0.1",
        "  --lr: 0.1 -> 0.2",
    ]
    assert last.startswith("Repeat its options to resume it, or choose another folder (--out). Only --checkpoint-min")
    assert last.endswith(", --wandb, --workers, the number of processes may change.")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, []),
        ({FINGERPRINT: "b"}, ["  --data: /a -> /b", f"  {FINGERPRINT}: a -> b"]),
        ({"loader": "own:load"}, ["  --data: /a -> /b"]),
        ({FINGERPRINT: None}, ["  --data: /a -> /b"]),
    ],
)
def test_the_same_data_may_be_at_another_path(change, lines):
    """The fingerprint of a loader of the user's may be the number of its images alone."""
    before = {"data": "/a", "val_data": "/a/v.tar", FINGERPRINT: "a"}
    now = {"data": "/b", "val_data": "/b/v.tar", FINGERPRINT: "a", **change}
    before |= {name: value for name, value in change.items() if name == "loader" or value is None}
    if not lines:
        return check_config(before, now, where="run")
    with pytest.raises(ValueError, match="run belongs to a run with other options") as caught:
        check_config(before, now, where="run")
    assert [line for line in str(caught.value).splitlines()[1:-1] if "val-data" not in line] == lines


def test_values_that_json_lacks_are_refused():
    assert json_values({"a": (1, {2: 3})}) == {"a": [1, {"2": 3}]}
    with pytest.raises(ValueError, match=r"config must hold values of JSON alone .*: .*set"):
        json_values({"a": {1}})

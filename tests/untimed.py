"""Records of a run without the fields that depend on the clock."""

from fused_lwlr.runs.metrics import read_records

TIMING = ("seconds", "loader_seconds", "step_seconds", "images_per_second", "tokens_per_second")


def untimed(path):
    return [{key: value for key, value in record.items() if key not in TIMING} for record in read_records(path)]

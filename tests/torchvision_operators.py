"""Repair a torchvision that cannot be imported because it was built for another torch; run by `make`.

With a torch for CPUs, the compiled operators of a torchvision for GPUs do not load. Its import then fails, since it
registers shapes for two of them. These are declared here, so that timm and the trainers of other libraries can import
it. A call of one is still an error. A torchvision that fits its torch is not changed.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

DECLARED = """

if not _has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def problem() -> str:
    """The last line of the error that a new process gets when it imports torchvision, or an empty text."""
    command = [sys.executable, "-c", "import torchvision"]
    return subprocess.run(command, capture_output=True, text=True).stderr.strip().rpartition("\n")[2]


def repair(package: Path) -> None:
    """Declare the operators in a file that torchvision imports before it registers shapes."""
    file = package / "extension.py"
    file.write_text(file.read_text(encoding="utf-8") + DECLARED, encoding="utf-8")


if __name__ == "__main__":
    if problem().endswith("operator torchvision::nms does not exist"):
        repair(Path(importlib.util.find_spec("torchvision").origin).parent)
    sys.exit(problem() or 0)

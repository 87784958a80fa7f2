"""Files of weights: written at the end of a run, and read to start from."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fused_lwlr.data import files
from fused_lwlr.training import state_dicts as states
from fused_lwlr.training.collectives import on_rank0


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the present weights in the form of `model.load_state_dict`. All ranks call it, and rank 0 writes."""
    content = states.of_model(model)
    on_rank0(lambda: files.save_tensors(path, content))


def load_weights(path: str | None, model: nn.Module) -> None:
    """Load weights into a model that is not sharded, in its own dtypes. All ranks call it, and rank 0 reads.

    Args:
        path: of a file in the form of `model.load_state_dict`; None loads nothing.
        model: with the same names and shapes.
    """
    if path is None:
        return
    content: dict[str, Tensor] = {}

    def read() -> None:
        content.update(_read(path, states.shapes(model)))

    on_rank0(read)
    states.load_model(model, content)


def _read(path: str, wanted: states.Shapes) -> dict[str, Tensor]:
    if not Path(path).is_file():
        problem = "it is a folder" if Path(path).is_dir() else "there is no such file"
        raise FileNotFoundError(f"--weights {path}: {problem}; give a file such as model.pt of a run")
    try:
        content: Any = files.read_tensors(Path(path))
    except ValueError as error:
        raise ValueError(f"--weights {path} cannot be read: {error}") from error
    if not (isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values())):
        raise ValueError(f"--weights {path} does not hold tensors by name: give a file such as model.pt of a run")
    # numbers of another precision are converted, as load_state_dict does
    converted = {name: value.to(wanted[name][1]) if name in wanted else value for name, value in content.items()}
    states.check_models({"model": converted}, {"model": wanted}, where=f"--weights {path}")
    return converted

"""Packages that an option needs and that are not installed with the library."""

import importlib
from types import ModuleType

import torch


def import_beside_torchvision(name: str) -> ModuleType:
    """Import a package that imports torchvision, also if torchvision was built for another torch.

    The torchvision of a package index is often built for GPUs: with a torch for CPUs its compiled operators do not
    load, and its import fails since it registers shapes for them. This function defines their schemas; models of timm
    and transforms of images do not call these operators.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )  # fmt: skip
    return importlib.import_module(name)


def import_extra(name: str, extra: str | None = None) -> ModuleType:
    """A package of an extra, by default the one with its name, or an ImportError that says what to install."""
    try:
        found = importlib.import_module(name)
        # Python imports a folder of this name in the working directory, such as the folder of results of wandb
        if getattr(found, "__file__", "") is None:
            raise ImportError(f"{name} is a folder")
    except ImportError as error:
        # not ModuleNotFoundError, which the command line shows as a bug
        raise ImportError(f"{name} is not installed: {_install(extra or name)}") from error
    return found


def import_timm(needed_by: str) -> ModuleType:
    """The package timm, or an ImportError that says what needs it and what to install."""
    try:
        timm = import_beside_torchvision("timm")
        importlib.import_module("timm.data")
    except ImportError as error:
        raise ImportError(f"{needed_by} needs timm ({error}): {_install('timm')}") from error
    return timm


def _install(extra: str) -> str:
    return f"pip install '.[{extra}]' in the folder of the sources of fused_lwlr"

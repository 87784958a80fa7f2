"""Packages that an option needs and that are not installed with the library."""

from types import ModuleType


def import_timm(needed_by: str) -> ModuleType:
    """The package timm, or an ImportError that says what needs it and what to install."""
    try:
        import timm
        import timm.data
    except ImportError as error:
        raise ImportError(f"{needed_by} needs timm ({error}): pip install 'fused_lwlr[timm]'") from error
    except RuntimeError as error:  # what a torchvision that was built for another torch raises
        raise ImportError(f"timm cannot be imported: {error}; does torchvision match this torch?") from error
    return timm  # type: ignore[no-any-return]

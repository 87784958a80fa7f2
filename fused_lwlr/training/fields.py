"""Types with bounds for the fields of a recipe, help, and errors with the user's spelling."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field


def _split(value: Any) -> Any:
    """Splits text, such as numbers of the command line, at commas."""
    return value.split(",") if isinstance(value, str) else value


def patterns(value: Any) -> Any:
    """Names and patterns; "none" stands for no pattern."""
    value = _split(value)
    return () if isinstance(value, (list, tuple)) and list(value) == ["none"] else value


def _known_augmentation(value: str) -> str:
    if value not in ("none", "basic", "strong", "three") and not value.startswith("rand-"):
        raise ValueError("must be none, basic, strong, three, or a policy of timm such as rand-m7-mstd0.5")
    return value


Count = Annotated[int, Field(ge=1)]
Part = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Side = Annotated[int, Field(ge=4)]
Pair = Annotated[tuple[Part, Part], BeforeValidator(_split)]
Channels = Annotated[tuple[float, float, float], BeforeValidator(_split)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Patterns = Annotated[tuple[str, ...], BeforeValidator(patterns)]
Scalings = Literal["none", "elr", "lars", "larc", "lamb", "ng", "hyperball", "floor", "brake", "clip", "balanced"]
Augmentation = Annotated[str, AfterValidator(_known_augmentation)]


def option(group: str, default: Any, help: str, *, shown: str | None = None, metavar: str | None = None) -> Any:
    """A field.

    Args:
        shown: the default in words, if it depends on other fields.
        metavar: the placeholder of the value, if it does not follow from the type.
    """
    return Field(default, description=help, json_schema_extra={"group": group, "shown": shown, "metavar": metavar})


def flag(name: str) -> str:
    """A field in its command-line spelling."""
    return f"--{name.replace('_', '-')}"


def place(name: str, where: Mapping[str, str] | None) -> str:
    """Where a field was given: an option, or the name of a file and the field."""
    return f"{where[name]}: {name}" if where and name in where else flag(name)


def readable(error: dict[str, Any], where: Mapping[str, str] | None) -> str:
    """One error of pydantic as a sentence."""
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    if error["type"] in ("missing", "too_long"):
        message = "must be as many numbers as the default has, separated by commas"
    if not error["loc"]:
        return message
    value = error["input"]
    shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return f"{place(str(error['loc'][0]), where)} {shown}: {message}"

"""The compiled code of the kernels, without a GPU: registers, spills and the width of memory accesses.

    python -m bench.codegen [TARGET[:DTYPE,...] ...]

Compiles every kernel for every target and prints a table. TRITON_INTERPRET must not be set.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from bench.machine_code import reports
from bench.rows import command, show
from bench.variants import DTYPES, TARGETS, TYPES, variants

HEAD = (
    "kernel", "dtype", "target", "registers", "resident", "spilled", "barriers", "code", "phases", "loads", "stores",
)  # fmt: skip
"""Resident: programs of a multiprocessor. Loads and stores are count x bits."""


def facts(selection: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Facts about every variant for some pairs of target and dtype."""
    for target, dtype in selection:
        every = list(variants(DTYPES[dtype]))
        for variant, report in zip(every, reports(every, TARGETS[target], TYPES), strict=True):
            yield {
                "kernel": variant.name, "least_resident": variant.least_resident, "dtype": dtype, "target": target,
                "block": variant.constants["BLOCK"], **report,
            }  # fmt: skip


def cells(found: dict[str, Any]) -> list[Any]:
    """A row of the table; some facts are known on NVIDIA GPUs alone."""
    widths = [", ".join(f"{n}x{bits}" for bits, n in found[key].items()) for key in ("loads", "stores")]
    numbers = [found[key] for key in HEAD[:6]] + [found.get(key, "") for key in ("barriers", "instructions")]
    return [*numbers, "+".join(map(str, found.get("phases", ()))), *widths]


def pairs(spec: str) -> list[tuple[str, str]]:
    """Pairs of target and dtype from "sm_90" or "sm_90:fp32,bf16".

    Raises:
        ValueError: an unknown target or dtype.
    """
    target, _, dtypes = spec.partition(":")
    found = [(target, dtype) for dtype in (dtypes.split(",") if dtypes else DTYPES)]
    if target not in TARGETS or any(dtype not in DTYPES for _, dtype in found):
        raise ValueError(f"{spec!r}: choose a target from {', '.join(TARGETS)}, and dtypes from {', '.join(DTYPES)}")
    return found


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Facts about all variants for all targets, or for one of them."""
    return facts(itertools.chain(*map(pairs, ["sm_90:fp32"] if quick else TARGETS)))


def main() -> None:
    """Compile, and print the results."""
    parser = command(__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET[:DTYPE,...]", help=f"of {', '.join(TARGETS)}; all")
    options = parser.parse_args()
    try:
        selection = list(itertools.chain(*map(pairs, options.targets or TARGETS)))
    except ValueError as error:
        parser.error(str(error))
    show(HEAD, map(cells, facts(selection)))


if __name__ == "__main__":
    main()

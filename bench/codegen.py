"""The compiled code of the kernels, without a GPU: registers, spills and the width of memory accesses.

    python -m bench.codegen [--target sm_90 ...] [--dtype fp32 ...]

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


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Reports of all variants, or of the variants of one target and dtype."""
    return facts([("sm_90", "fp32")] if quick else itertools.product(TARGETS, DTYPES))


def main() -> None:
    """Compile, and print the results."""
    parser = command(__doc__)
    for name, known in (("--target", TARGETS), ("--dtype", DTYPES)):
        parser.add_argument(name, action="append", choices=known, help="may be repeated; all by default")
    given = parser.parse_args()
    show(HEAD, map(cells, facts(itertools.product(given.target or TARGETS, given.dtype or DTYPES))))


if __name__ == "__main__":
    main()

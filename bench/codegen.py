"""The compiled code of the kernels, without a GPU: registers, spills and the width of memory accesses.

    python -m bench.codegen [--json] [TARGET[:DTYPE,...] ...]

Compiles every kernel for every target and prints a table, or one JSON object a line. TRITON_INTERPRET
must not be set.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import triton

from bench.machine_code import Job, reports
from bench.rows import command
from bench.variants import DTYPES, TARGETS, TYPES, variants

HEAD = (
    f"{'kernel':19} {'dtype':5} {'target':7} {'registers':>9} {'resident':>8} {'spilled':>7} "
    f"{'barriers':>8} {'code':>5}  "
    "phases; loads / stores"
)


def facts(selection: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Facts about every variant for some pairs of target and dtype."""
    for target, dtype in selection:
        every = list(variants(DTYPES[dtype]))
        jobs = [Job(variant.kernel, variant.constants, TYPES, variant.registers) for variant in every]
        for variant, report in zip(every, reports(jobs, TARGETS[target]), strict=True):
            yield {
                "kernel": variant.name, "least_resident": variant.least_resident, "dtype": dtype, "target": target,
                "block": variant.constants["BLOCK"], **report,
            }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """One row of the table; accesses are count x bits."""
    widths = " / ".join(", ".join(f"{n}x{bits}" for bits, n in found[key].items()) for key in ("loads", "stores"))
    numbers = f"{found['registers']:9} {found['resident']:8} {found['spilled']:7}"
    if "phases" in found:
        numbers += f" {found['barriers']:8} {found['instructions']:5}  {'+'.join(map(str, found['phases']))}; "
    return f"{found['kernel']:19} {found['dtype']:5} {found['target']:7} {numbers}  {widths}"


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


def main() -> None:
    """Compile, and print the results."""
    parser = command(__doc__, "--json")
    parser.add_argument("targets", nargs="*", metavar="TARGET[:DTYPE,...]", help=f"of {', '.join(TARGETS)}; all")
    options = parser.parse_args()
    try:
        selection = list(itertools.chain(*map(pairs, options.targets or TARGETS)))
    except ValueError as error:
        parser.error(str(error))
    if not options.json:
        print(f"triton {triton.__version__}; resident: programs of a multiprocessor; accesses as count x bits\n{HEAD}")
    for found in facts(selection):
        print(json.dumps(found) if options.json else line(found), flush=True)


if __name__ == "__main__":
    main()

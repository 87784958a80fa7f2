"""Multi-tensor operations over a `Table`: the readable reference and its Triton twin.

Imported as `fused_lwlr.kernels` only. `prepare`, `step` and `statistics` of `triton` do what the functions of
`reference` with the same names define; neither imports the other, and neither uses `torch.optim`.
"""

if __name__ == "fused_lwlr.kernels":
    from fused_lwlr.kernels.rules import ADAMW, LION, SGD, Hyper, Rule
    from fused_lwlr.kernels.step_arguments import (
        RETRACTION_STATISTICS,
        STEP_STATISTICS,
        FactorFormula,
        Factors,
        Gate,
        Retraction,
        totals_of,
    )
    from fused_lwlr.kernels.table import STATISTICS, Row, Table

    __all__ = [
        "ADAMW", "LION", "RETRACTION_STATISTICS", "SGD", "STATISTICS", "STEP_STATISTICS", "FactorFormula", "Factors",
        "Gate", "Hyper", "Retraction", "Row", "Rule", "Table", "totals_of",
    ]  # fmt: skip
else:
    # a bare `import kernels` must not fail: transformers tries it, to find the version of another project
    __path__.clear()

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"this package is fused_lwlr.kernels, but it was imported as {__name__!r}: "
            "import fused_lwlr.kernels, and take its folder off sys.path"
        )

"""Train studies on Fashion-MNIST with more seeds, on the GPU that is there; the same command continues them.

python -m bench.gpu_studies --out FOLDER
"""

from bench.rows import command, write
from fused_lwlr.papers.runner import run_study
from fused_lwlr.papers.store import Store, frame, save_report
from fused_lwlr.papers.studies import find

SEEDS = {"lwlr-fashion": 10, "large-batch": 10}
"""Study -> number of seeds, in this order."""
AT_ONCE = 4
"""Trainings at a time: a small network does not fill a GPU."""


def main() -> None:
    """The command line."""
    options = command(__doc__, "--rehearsal", "--out").parse_args()
    rehearsal = {"quick": True, "data": "digits"}
    at_once = 1 if options.rehearsal else AT_ONCE
    for name, seeds in list(SEEDS.items())[: 1 if options.rehearsal else None]:
        study = find(name)
        settings = study.settings(**(rehearsal if options.rehearsal else {"seeds": seeds, "device": "cuda"}))
        store = Store(options.out / name, settings)
        results = run_study(study, store, at_once, on_job=lambda job, name=name: write({"study": name, "job": job}))
        found = frame(results)
        paths = [store.save_results(results), *save_report(store.out, study, study.tables(settings, found), found)]
        print(f"Wrote {', '.join(map(str, paths))}.")


if __name__ == "__main__":
    main()

"""Write the tables and pictures of recorded studies from their recorded results; nothing is trained.

python -m bench.studies            # writes all
python -m bench.studies NAME ...   # writes some
"""

from bench.rows import RESULTS, command
from fused_lwlr.papers.store import load_recorded, save_report
from fused_lwlr.papers.studies import find

RECORDED = RESULTS / "studies"


def main() -> None:
    """The command line."""
    parser = command(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all recorded studies by default")
    recorded = sorted(path.name for path in RECORDED.iterdir())
    for name in parser.parse_args().names or recorded:
        if name not in recorded:
            parser.error(f"{name} is not recorded: give one of {', '.join(recorded)}")
        study = find(name)
        settings, results = load_recorded(RECORDED / name / "results.json", study)
        paths = save_report(RECORDED / name, study, study.tables(settings, results), results)
        print(f"Wrote {', '.join(map(str, paths))}.")


if __name__ == "__main__":
    main()

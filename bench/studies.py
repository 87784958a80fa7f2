"""Write the tables and pictures of recorded studies from their recorded results; nothing is trained.

python -m bench.studies            # writes all
python -m bench.studies NAME ...   # writes some
"""

from bench.rows import RESULTS, command
from fused_lwlr.papers.store import load_recorded, save_report
from fused_lwlr.papers.studies import STUDIES, find

RECORDED = RESULTS / "studies"


def main() -> None:
    """The command line."""
    parser = command(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(STUDIES)}")
    for name in parser.parse_args().names or sorted(path.name for path in RECORDED.iterdir()):
        study = find(name)
        settings, results = load_recorded(RECORDED / name / "results.json", study)
        paths = save_report(RECORDED / name, study, study.tables(settings, results), results)
        print(f"Wrote {', '.join(map(str, paths))}.")


if __name__ == "__main__":
    main()

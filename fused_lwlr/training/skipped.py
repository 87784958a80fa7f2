"""The list of files of a run that could not be read: `skipped.txt` in its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fused_lwlr.data import files
from fused_lwlr.training.collectives import gather_to_rank0, on_rank0


class SkippedList:
    """Adds names to `skipped.txt`, each once. Names that could not be written are written with the next ones.

    If the list cannot be written, `notice` gets a line for the user, on rank 0.
    """

    def __init__(self, folder: Path, notice: Callable[[str], object]) -> None:
        self.path, self.notice = folder / "skipped.txt", notice
        self._names: set[str] = set()

    def add(self, names: Sequence[str]) -> int:
        """Add the names of this rank, in a call of all ranks; their number on all ranks is returned."""
        lists = gather_to_rank0(tuple(names))

        def write() -> int:
            self._names.update(*lists)
            try:
                content = self.path.read_bytes() if self.path.exists() else b""
                known = content.decode(errors="surrogateescape").splitlines()
                every = dict.fromkeys([*known, *sorted(self._names)])
                files.replace_text(self.path, "".join(f"{name}\n" for name in every))
                self._names.clear()
            except OSError as error:
                self.notice(
                    f"{self.path} could not be written ({error.strerror}). Training continues, and tries again."
                )
            return sum(map(len, lists))

        return on_rank0(write)

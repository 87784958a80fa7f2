"""Images in tar files, in WebDataset's form: `0012.jpg` and `0012.cls`, which holds the number of its class."""

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fused_lwlr.data.decode import open_rgb
from fused_lwlr.data.fingerprint import digest
from fused_lwlr.data.folder import EXTENSIONS, Listing, every_fifth
from fused_lwlr.data.sources import Files

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
DIGITS = 20
"""Most bytes of a class file, with white space."""
CLASSES = 100_000
"""Most classes of a data set with fewer images: a wrong class number would fill the memory with empty classes."""


class Member(NamedTuple):
    """An image in a tar file: its name there, and the position of its bytes."""

    shard: str
    name: str
    offset: int
    size: int


class Members(Files):
    """Images in tar files, each read separately, in any order."""

    def __init__(self, members: Sequence[Sequence[Member]]) -> None:
        super().__init__([[os.path.join(member.shard, member.name) for member in of_class] for of_class in members])
        flat = [member for of_class in members for member in of_class]
        self.shards = sorted({member.shard for member in flat})
        number = {shard: i for i, shard in enumerate(self.shards)}
        self.places = np.array([(number[member.shard], member.offset, member.size) for member in flat], np.int64)

    def open(self, index: int) -> Any:
        shard, offset, size = self.places[index].tolist()
        try:
            with open(self.shards[shard], "rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise ValueError(f"cannot read the image {self.path(index)}: {error.strerror}") from error
        return open_rgb(io.BytesIO(content), self.path(index))

    def fingerprint(self) -> str:
        """By names, classes, places and sizes of all images."""
        return digest(self.names, self.ends, self.targets, self.places)


def scan_shards(data: str, val_data: str | None) -> Listing[Member]:
    """The images of tar files; the names of the classes are their numbers.

    The headers of all members are read, and no image. Images come in the order of shards and names.

    Args:
        data: a tar file, or a pattern of several: `shards-{000..146}.tar`.
        val_data: the same for validation; without it, every fifth image of a class is for validation.
    """
    train = _by_class(data)
    if len(train) < 2:
        raise ValueError(f"{data} has images of {len(train)} class(es): two at least are needed")
    names = tuple(map(str, range(len(train))))
    if val_data is None:
        return every_fifth(names, train, data, "val_data")
    val = _by_class(val_data)
    if len(val) > len(train):
        raise ValueError(f"{val_data} has class {len(val) - 1}, but {data} only classes up to {len(train) - 1}")
    return Listing(names, train, val + [[] for _ in train[len(val) :]], val_data)


def expand(pattern: str) -> list[str]:
    """The names that a pattern expands to: `a-{08..10}.tar` for a-08.tar, a-09.tar and a-10.tar."""
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    if int(last) < int(first):
        raise ValueError(f"{pattern} has a range that goes backward: give {{{last}..{first}}}")
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [name for n in range(int(first), int(last) + 1) for name in expand(f"{before}{n:0{len(first)}}{after}")]


def _by_class(pattern: str) -> list[list[Member]]:
    shards = expand(pattern)
    for shard in shards:
        if not os.path.exists(shard):
            raise FileNotFoundError(f"there is no file {shard}: give tar files of this machine, not {pattern}")
    members = [found for shard in shards for found in sorted(_members(shard))]
    if not members:
        raise ValueError(f"{pattern} holds no images ({', '.join(sorted(EXTENSIONS))}) with their classes (.cls)")
    target, member = max(members, key=lambda found: found[0])
    if target >= max(CLASSES, len(members)):
        raise ValueError(
            f"{member.shard} has class {target} for {member.name}, but {pattern} has {len(members)} images: number the "
            "classes from 0"
        )
    classes: list[list[Member]] = [[] for _ in range(target + 1)]
    for target, member in members:
        classes[target].append(member)
    return classes


def _members(shard: str) -> Iterator[tuple[int, Member]]:
    """The images of a tar file with their classes."""
    images: dict[str, Member] = {}
    targets: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as file:
            for entry in file:
                folder, name = os.path.split(entry.name)
                name, _, extension = name.partition(".")
                key = os.path.join(folder, name)
                image = f".{extension.lower()}" in EXTENSIONS
                if image and (entry.islnk() or entry.issym()):
                    raise ValueError(
                        f"{shard} has a link for {entry.name}: pack the file itself (tar -h --hard-dereference)"
                    )
                if image and entry.issparse():  # the bytes of its holes are not in the file
                    raise ValueError(f"{shard} has {entry.name} as a sparse file: pack it without --sparse (tar -S)")
                if not entry.isfile():
                    continue
                if image:
                    other = images.get(key)
                    if other is not None and other.name != entry.name:
                        raise ValueError(f"{shard} has {other.name} and {entry.name} for {key}.cls: keep one of them")
                    images[key] = Member(shard, entry.name, entry.offset_data, entry.size)
                elif extension.lower() == "cls":
                    content: Any = file.extractfile(entry)
                    targets[key] = _class(content.read(DIGITS + 1), f"{shard}/{entry.name}")
            _check_end(file, shard)
    except tarfile.TarError as error:
        raise ValueError(f"{shard} is not an uncompressed tar file: {error}") from error
    for key, member in images.items():
        if key not in targets:
            raise ValueError(f"{shard} has no class for {member.name}: {key}.cls, with a number from 0 in it")
        yield targets[key], member


def _check_end(file: tarfile.TarFile, shard: str) -> None:
    """Refuses a file without zeros after its last member, since tarfile stops silently at a damaged header."""
    content: Any = file.fileobj
    content.seek(file.offset)
    end = content.read(2 * tarfile.RECORDSIZE)
    if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
        raise ValueError(
            f"{shard} does not end after its last readable member, at byte {file.offset}: it is damaged, cut off, or "
            "several tar files one after another. Copy it again, or pack it again"
        )


def _class(content: bytes, where: str) -> int:
    if not content.strip().isdigit() or len(content) > DIGITS:
        raise ValueError(f"{where} holds {content[:20]!r}, and not the number of a class, from 0")
    return int(content)

"""A file is replaced whole: readers, and a crash at any time, find the old content or the new one."""

import os

import pytest

from fused_lwlr.data.files import replace, replace_text


def test_the_old_file_stays_until_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    path, calls = tmp_path / "file.json", []
    replace_text(path, "old")

    def recorded(name):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: (calls.append((name, path.read_text())), function(*args))[1])

    def write(file):
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"

    recorded("fsync")
    recorded("replace")
    replace(path, write)
    assert calls == [("fsync", "old"), ("replace", "old")] + [("fsync", "new")] * (os.name == "posix")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", ["old", None])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_changes_nothing(error, before, tmp_path):
    path = tmp_path / "file.json"
    if before is not None:
        path.write_text(before)

    def write(file):
        file.write(b"ne")
        file.flush()
        raise error

    with pytest.raises(error):
        replace(path, write)
    assert [each.read_text() for each in tmp_path.iterdir()] == [before] * (before is not None)

"""The project's files for GitHub: continuous integration, issue forms, citation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fused_lwlr

ROOT = Path(__file__).parents[1]


def load(name):
    return pytest.importorskip("yaml").safe_load((ROOT / name).read_text())


@pytest.fixture
def jobs():
    return load(".github/workflows/ci.yml")["jobs"]


def commands(job):
    """Yields the commands of a job, once for each row of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = matrix.get("include") or [{"triton": triton} for triton in matrix.get("triton", [""])]
    for row in rows:
        for step in job["steps"]:
            if "run" in step and (step.get("if") != "matrix.triton" or "triton" in row):
                yield step["run"].replace("${{ matrix.triton }}", str(row.get("triton", "")))


def test_ci_runs_everything_that_has_to_pass(jobs):
    run = {command for job in jobs.values() for command in commands(job)}
    lines = re.findall(r"^make (?:-j \d )?(.+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    has_to_pass = {f"make {target}" for line in lines for target in line.split() if target != "environments"}
    assert len(has_to_pass) > 3
    assert has_to_pass <= run
    rules = re.findall(r"^([\w.$()/%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    patterns = [re.escape(rule.replace("$(VENV)", ".venv")).replace("%", r"[\d.]+") for rule in rules]
    for command in run:
        target = command.removeprefix("make ")
        assert any(re.fullmatch(pattern, target) for pattern in patterns), target


def test_ci_tests_the_versions_that_the_makefile_installs(jobs):
    rows = jobs["test"]["strategy"]["matrix"]["include"]
    makefile = (ROOT / "Makefile").read_text()
    for name in ("torch", "torchvision"):
        (version,) = re.findall(rf"^{name.upper()} \?= (\S+)", makefile, re.MULTILINE)
        assert version in {row[name] for row in rows}
    # the oldest version that the package allows
    oldest = re.findall(r"requires-python = \">=(\S+)\"|\"torch>=(\d+\.\d+)\"", (ROOT / "pyproject.toml").read_text())
    (python, _), (_, torch) = oldest
    assert any(row["python"] == python and row["torch"].startswith(torch) for row in rows)


def test_a_person_starts_a_release_and_approves_it():
    release = load(".github/workflows/release.yml")
    # YAML 1.1 reads the key `on` as True
    assert list(release[True]) == ["workflow_dispatch"]
    assert release["permissions"] == {"contents": "read"}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert "permissions" not in build
    assert (publish["needs"], publish["environment"], publish["permissions"]) == (
        "build",
        "pypi",
        {"id-token": "write"},
    )
    ((check, build_command), publishing) = commands(build), list(commands(publish))
    assert check.startswith('test "$GITHUB_REF" = "refs/tags/v$(')
    assert build_command == "make dist"
    assert publishing == []


@pytest.mark.parametrize(("tag", "status"), [(fused_lwlr.__version__, 0), ("99.0.0", 1)])
def test_a_release_has_the_tag_of_its_version(tag, status):
    check, _ = commands(load(".github/workflows/release.yml")["jobs"]["build"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", check], cwd=ROOT, env={"PATH": path, "GITHUB_REF": f"refs/tags/v{tag}"}, check=False
    )
    assert run.returncode == status


def test_the_citation_is_of_this_version():
    assert load("CITATION.cff")["version"] == fused_lwlr.__version__


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "bench/README.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_what_contributing_names_is_there():
    """Commands of make, and paths of files and folders."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z0-9.-]+)`", text):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    paths = re.findall(r"`((?:tests|bench|kernels|fused_lwlr)/[\w./]+|\.ci/run)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []

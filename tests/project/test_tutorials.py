"""The tutorials run: each command of a page in order, and what the page shows of its output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from training_job import alive, environment
from tutorial import Step, follow, steps

from lab import netns

pytestmark = pytest.mark.slow

_OK, _REASON = netns.available()

#: Pages whose commands run on any machine, their sections that do (empty: all), and the number of
#: commands.
PAGES = [
    ("start/first-ten-minutes.md", "", 9),
    ("start/read-a-profile.md", "", 6),
    ("start/attach.md", "Try it on one machine", 4),
    ("operate/cluster.md", "Try it on one machine", 10),
    ("understand/policies.md", "Ask the simulator", 2),
]


def text_of(name: str, section: str) -> str:
    page = (ROOT / "docs" / name).read_text("utf-8")
    return page.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else page


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize(("name", "section", "number"), PAGES, ids=lambda given: given)
def test_the_page_is_what_happens(name: str, section: str, number: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert len(follow(text_of(name, section), folder)) == number


@pytest.mark.skipif(not _OK, reason=_REASON)
def test_your_network_in_five_minutes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    # The first command opens a shell, which reads the others.
    (folder / "lab").symlink_to(ROOT / "lab")
    page = (ROOT / "docs/start/your-network.md").read_text()
    assert len(follow(page, folder)) == 3
    assert (folder / "cluster.yaml").read_text().startswith("# ")


@pytest.mark.full
def test_two_jobs_on_one_link(tmp_path: Path) -> None:
    """The command of docs/start/demo.md, by default through a network of namespaces."""
    command = [sys.executable, "-m", "lab", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/start/demo.md").read_text()
    for table in ("Profile and plan", "Median step time", "Bytes on the shared link")[
        : 3 if _OK else 2
    ]:
        assert table in page
        assert table in done.stdout
    assert done.stdout.count("equal") == 2, "losses of both jobs are those of the stock backend"
    assert (tmp_path / "report.html").is_file()


def test_what_a_page_shows_wrongly_is_found(tmp_path: Path) -> None:
    page = "```\n$ echo 'a\nb'\na\nb\n$ false\n$ echo $?\n2\n```\n"
    assert next(iter(steps(page))) == Step("echo 'a\nb'", ["a", "b"])
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError, match=r"echo \$\?: \['2'\]"):
        follow(page, folder)


def test_a_job_of_a_page_that_fails_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError, match="gone"):
        follow("```\n$ sleep 1000 &\n$ echo $! > job\n$ echo here\ngone\n```\n", folder)
    assert not alive(int((folder / "job").read_text()))

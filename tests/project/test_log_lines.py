"""Who is heard on stderr, and in which words."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from crux_torch.logs import news, to_stderr

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(.*?)\] (\w+) (.*)"


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> logging.Logger:
    return logging.getLogger(f"test_log_lines.{request.node.name}")


@contextmanager
def root_with(*handlers: logging.Handler) -> Iterator[None]:
    """A program that has set up these; pytest's own come after the fixtures."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, list(handlers)
    try:
        yield
    finally:
        root.handlers = before


def said(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, ...]]:
    news(logger).info("the plan")
    logger.getChild("part").info("a detail")
    logger.warning("beware")
    logger.error("broken")
    lines = capsys.readouterr().err.splitlines()
    return [match.groups() for line in lines if (match := re.fullmatch(LINE, line))]


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("ERROR", ["broken"]),
        ("WARNING", ["the plan", "beware", "broken"]),
        ("INFO", ["the plan", "a detail", "beware", "broken"]),
    ],
)
def test_news_are_shown_unless_only_errors_are(
    level: str, words: list[str], logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    with root_with():
        to_stderr(logger, "crux job-1", level)
        heard = said(logger, capsys)
    assert [text for *_, text in heard] == words
    assert {who for who, *_ in heard} == {"crux job-1"}


def test_the_next_job_of_a_process_has_its_own_name(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in ("one", "two"):
        with root_with():
            to_stderr(logger, f"crux {job}", "WARNING")
            heard = said(logger, capsys)
        assert {who for who, *_ in heard} == {f"crux {job}"}
    assert len(logger.handlers) == 1


def test_a_program_with_logging_of_its_own_gets_the_messages_as_it_wants_them(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[logging.LogRecord] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    with root_with(Own()):
        to_stderr(logger, "crux job", "WARNING")
        assert said(logger, capsys) == []
    assert [record.getMessage() for record in records] == ["the plan", "beware", "broken"]

"""Lines on stderr, each with a time, who says it, and the job's name."""

from __future__ import annotations

import logging

_TIME = "%Y-%m-%d %H:%M:%S"


def to_stderr(logger: logging.Logger, who: str, level: str, *, alone: bool = False) -> None:
    """Send what ``logger`` is told to stderr, unless the program has set up logging for it.

    Args:
        who: begins the lines: the program, and its job.
        level: the least severe messages that are shown. :func:`news` are shown unless it is ERROR.
        alone: nobody else sees the messages, whatever the program has set up.
    """
    logger.setLevel(level)
    news(logger).setLevel(logging.ERROR if level == "ERROR" else logging.INFO)
    if alone:
        logger.propagate = False
    elif logging.getLogger().handlers:
        return
    own = [handler for handler in logger.handlers if isinstance(handler, _Lines)]
    if not logger.handlers:
        own = [_Lines()]
        logger.addHandler(own[0])
    for handler in own:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s [{who}] %(levelname)s %(message)s", _TIME)
        )


def news(logger: logging.Logger) -> logging.Logger:
    """The logger for the few messages of a whole job that everyone should see."""
    return logger.getChild("news")


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that is ours: the next job of this process gives its lines another name."""

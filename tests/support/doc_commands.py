"""The commands that the documentation shows, word by word."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from places import ROOT

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")), *ROOT.glob("docs/*/*.md")]
#: A block of code without a language, or of a shell.
BLOCK = re.compile(r"^( *)```(?:sh|console)?\n(.*?)^\1```$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
PROGRAMS = ("crux", "cruxrun", "make", "python")
#: A line of the log, which begins with the library's and the job's name.
LOGGED = re.compile(r"(\S+ \S+ )?\[crux(run)? \S+\] ")
#: Operators of the shell.
SEPARATOR = re.compile(r"[;|&()<>]+")


class Shown(NamedTuple):
    page: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def shown() -> Iterator[Shown]:
    """Each command of ours that a page has in a block of code or within a sentence."""
    for page in PAGES:
        text = page.read_text("utf-8")
        blocks = [match[2].replace("\\\n", " ") for match in BLOCK.finditer(text)]
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        # Blocks first: their backticks are no spans.
        prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)
        lines += [span.replace("\n", " ") for span in SPAN.findall(prose)]
        for line in lines:
            if LOGGED.match(line):
                continue
            for words in _commands(line.removeprefix("$ ")):
                # Tables have rows that begin with the name of a policy.
                if len(words) == 1 or not words[1][0].isdigit():
                    yield Shown(str(page.relative_to(ROOT)), words)


def _commands(line: str) -> Iterator[list[str]]:
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split = True
        tokens = list(lexer)
    except ValueError:
        return  # output of a command, with an apostrophe in it
    words: list[str] = []
    for token in [*tokens, ";"]:
        if not SEPARATOR.fullmatch(token):
            words.append(token.strip("[]"))
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if token[0] in "<>" and words and words[-1].isdigit():
            words.pop()
        if words and words[0].removeprefix(".venv/bin/") in PROGRAMS:
            words[0] = words[0].removeprefix(".venv/bin/")
            yield words
        words = []

"""Prints how large the project is, and how many files a reader opens to follow one thing.

    python tools/house.py [--walks]

Sizes are read from the files that git tracks. A walk runs a program and counts the files of the
package in which a function ran; ``--walks`` needs the extension built in the tree.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import walks

RIDDLE = re.compile(r"(What|Whether|Which|Those|Whom|Who|How|Of|For whom)\b")


def tracked(tree: Path, *patterns: str) -> list[Path]:
    """Returns the files of ``tree`` that git tracks and that match one of git's patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=tree, capture_output=True, text=True, check=True
    )
    return [tree / name for name in listed.stdout.split("\0")[:-1]]


def lines(files: list[Path]) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in files)


def nodes(files: list[Path]) -> Iterator[ast.AST]:
    for file in files:
        yield from ast.walk(ast.parse(file.read_text()))


def docstring_riddles(files: list[Path]) -> int:
    """Returns how many docstrings begin with a word whose subject the reader must guess."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = (ast.get_docstring(node) for node in nodes(files) if isinstance(node, kinds))
    return sum(bool(doc and RIDDLE.match(doc)) for doc in docs)


def private_uses(files: list[Path]) -> int:
    """Returns how often a name with one leading underscore is read from another object."""
    return sum(
        isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr) is not None
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in nodes(files)
    )


def fixed_sleeps(files: list[Path]) -> int:
    """Returns how often ``time.sleep`` is called with a constant."""
    return sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("time.sleep", "sleep")
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        for node in nodes(files)
    )


def settings(tree: Path) -> int:
    """Returns how many fields the class ``Settings`` has, each of which is a variable."""
    body = ast.parse((tree / "crux_torch/settings.py").read_text()).body
    kinds = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    return sum(isinstance(node, ast.AnnAssign) for node in kinds[0].body)


def sizes(tree: Path) -> Iterator[tuple[str, int | str]]:
    """Yields each measure of the tree with its value."""
    package = tracked(tree, "crux_torch/*.py", "launcher/*.py")
    tests = tracked(tree, "tests/*.py")
    cxx = tracked(tree, "csrc/*.cc", "csrc/*.cpp", "csrc/*.h", "csrc/*.c")
    largest = max(package, key=lambda file: lines([file]))
    yield "Python files of the package", len(package)
    yield "their lines", lines(package)
    yield "lines a file, in the mean", round(lines(package) / len(package))
    yield "largest file", f"{lines([largest])} ({largest.relative_to(tree)})"
    yield "Python files of tests", len(tests)
    yield "their lines", lines(tests)
    yield "C++ files", len(cxx)
    yield "their lines", lines(cxx)
    yield "settings", settings(tree)
    yield "docstrings that begin with What, Whether, …", docstring_riddles(package)
    yield "private names used by tests", private_uses(tests)
    yield "sleeps of a fixed time in tests", fixed_sleeps(tests)
    yield (
        "tests that import a test",
        sum(
            isinstance(node, ast.ImportFrom) and (node.module or "").startswith("test_")
            for node in nodes(tests)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--walks", action="store_true")
    options = parser.parse_args()
    for name, value in sizes(options.tree):
        print(f"{name:44} {value}")
    if options.walks:
        for name, count in walks.count(options.tree):
            print(f"{'files on the way: ' + name:44} {count}")


if __name__ == "__main__":
    main()

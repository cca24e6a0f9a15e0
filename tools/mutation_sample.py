"""Kills a random sample of mutants: ``python tools/mutation_sample.py [--count 60] [--seed 0]``.

A mutant is a copy of the tree in which one comparison, operator, constant or condition differs. It
is killed if a test of its module fails. A survivor is equivalent to the original, or it shows what
no test checks.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = "schedule,control,measure"
#: Arguments that only make mistakes raise: without them everything else stays the same.
CHECKS = ("frozen", "slots", "strict", "kw_only", "forbid_unknown_fields")
#: A mutant that makes tests hang is killed after this.
LIMIT_S = 600
COMPARE: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def sites(tree: ast.Module) -> list[int]:
    """Places of the nodes that can be mutated, in the order of ``ast.walk``."""
    checks = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in CHECKS
    }
    walked = enumerate(ast.walk(tree))
    return [number for number, node in walked if _change(node) and id(node) not in checks]


def mutate(tree: ast.Module, site: int) -> str:
    """Changes the node at ``site`` in place, and says how."""
    node = next(n for number, n in enumerate(ast.walk(tree)) if number == site)
    before = ast.unparse(node)
    for name, value in (_change(node) or {}).items():
        setattr(node, name, value)
    return f"{node.lineno}: {before}  ->  {ast.unparse(node)}"  # type: ignore[attr-defined]


def _change(node: ast.AST) -> dict[str, object] | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        return {"ops": [COMPARE[type(node.ops[0])](), *node.ops[1:]]}
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in ARITHMETIC:
        annotation = isinstance(node.op, ast.BitOr) and not hasattr(node, "values")
        return None if annotation else {"op": ARITHMETIC[type(node.op)]()}
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        old = node.value
        return {"value": not old if isinstance(old, bool) else old + 1}
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return {"test": ast.UnaryOp(ast.Not(), node.test)}
    return None


def killed(tree: Path, package: str, module: str) -> bool:
    """Whether a test that imports the mutated module fails, or else one of its package."""
    found = sorted((tree / "tests" / package).glob("test_*.py"))
    imports = re.compile(rf"crux_torch\.{package}(\.{module}\b| import .*\b{module}\b)")
    files = [file for file in found if imports.search(file.read_text())] or found
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *map(str, files)]
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree}/launcher"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    """Prints each survivor, then killed/total."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", default=PACKAGES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "build", "out", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=ignored)
        every = [
            (file, site)
            for package in options.packages.split(",")
            for file in sorted((tree / "crux_torch" / package).glob("*.py"))
            for site in sites(ast.parse(file.read_text()))
        ]
        sample = random.Random(options.seed).sample(every, min(options.count, len(every)))
        dead = 0
        for file, site in sample:
            original = file.read_text()
            mutant = ast.parse(original)
            change = mutate(mutant, site)
            file.write_text(ast.unparse(mutant))
            alive = not killed(tree, file.parent.name, file.stem)
            file.write_text(original)
            dead += not alive
            if alive:
                print(f"survived: {file.relative_to(tree)}:{change}", flush=True)
    print(f"{dead}/{len(sample)} mutants killed, of {len(every)} (seed {options.seed})")


if __name__ == "__main__":
    main()

"""Compiles each C++ file of the build alone, without making an object: a file must not lean on what
another one of its unity build includes or defines.

Arguments: parts of paths (``process_group``); without any, all files.
"""

import json
import subprocess
import sys
from pathlib import Path

COMMANDS = Path("build", "compile_commands.json")


def main(parts: list[str]) -> int:
    """Returns 1 if a file does not compile."""
    failed = 0
    for entry in json.loads(COMMANDS.read_text()):
        if parts and not any(part in entry["file"] for part in parts):
            continue
        command = [*entry["arguments"], "-fsyntax-only", "-Wall", "-Werror"]
        if subprocess.run(command, cwd=entry["directory"], check=False).returncode:
            print(f"{entry['file']}: does not compile alone", flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

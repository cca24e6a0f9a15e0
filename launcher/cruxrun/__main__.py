"""The command ``cruxrun``, also called as ``python -m cruxrun``."""

import os
import signal
import sys
from typing import Any

#: What a shell reports of a program that Ctrl-C ended.
INTERRUPTED = 130


def main() -> None:
    """Launch a job; where torch is not installed, say in one line what to install."""
    # Importing torch takes seconds, and code in it turns an interruption into other errors.
    ends = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ends:
        signal.signal(signal.SIGINT, _end)
    if sys.argv[1:] == ["--version"]:
        print(_version())
        return
    try:
        from cruxrun.main import main as launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        raise SystemExit("cruxrun needs torch: pip install 'crux-torch[live]'") from None
    if ends:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        # torch's SignalException: its agent has ended the workers.
        if getattr(error, "sigval", None) != signal.SIGINT:
            raise
        raise SystemExit(INTERRUPTED) from None


def _end(*_: Any) -> None:
    """Nothing has begun that would have to be ended."""
    os._exit(INTERRUPTED)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from crux_torch._version import __version__

    try:
        return f"cruxrun {__version__} (torch {version('torch')})"
    except PackageNotFoundError:
        return f"cruxrun {__version__} (no torch)"


if __name__ == "__main__":
    main()

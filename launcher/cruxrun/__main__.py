"""The command ``cruxrun``, also called as ``python -m cruxrun``."""


def main() -> None:
    """Launch a job; where torch is not installed, say in one line what to install."""
    try:
        from cruxrun.main import main as launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        raise SystemExit("cruxrun needs torch: pip install 'crux-torch[live]'") from None
    launch()


if __name__ == "__main__":
    main()

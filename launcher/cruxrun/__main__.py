"""``python -m cruxrun``."""

from cruxrun.main import main

if __name__ == "__main__":
    main()

"""``python -m lab``: the demo."""

from lab.demo import main

main()

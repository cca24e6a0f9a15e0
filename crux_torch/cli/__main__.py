"""``python -m crux_torch.cli`` is ``crux``."""

from crux_torch.cli.main import main

main()

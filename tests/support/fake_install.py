"""An installed distribution, as far as entry points can tell."""

from pathlib import Path


def install_entry_point(folder: Path) -> None:
    """Declare the launcher's entry point to every interpreter with ``folder`` on its path.

    Under the package's own name, so that it hides the real one where that is installed.
    """
    info = folder / "crux_torch-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: crux-torch\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\ncrux = cruxrun.autoload:attach_if_launched\n"
    )

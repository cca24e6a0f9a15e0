"""Writes figures as PNG files, and as one HTML page that holds all of them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2
import matplotlib

from evaluation.figures.catalogue import Drawn, LeftOut
from evaluation.figures.fields import ResultError
from evaluation.figures.style import SETTINGS

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write(
    drawn: Sequence[Drawn], left_out: Sequence[LeftOut], folder: Path
) -> tuple[list[Path], Path]:
    """Writes a PNG for each figure, and the page. Returns the PNGs and the page.

    Raises:
        ResultError: they can't be written.
    """
    images = [_png(item) for item in drawn]
    encoded = [base64.b64encode(image).decode("ascii") for image in images]
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    text = template.render(drawn=list(zip(drawn, encoded, strict=True)), left_out=left_out)
    files, page = [folder / f"{item.plate.name}.png" for item in drawn], folder / "figures.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, image in zip(files, images, strict=True):
            file.write_bytes(image)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{folder}: can't be written: {error}") from None
    return files, page


def _png(item: Drawn) -> bytes:
    buffer = io.BytesIO()
    # Neither date nor version stand in the file, so that the same result gives the same bytes.
    with matplotlib.rc_context(SETTINGS):
        item.figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()

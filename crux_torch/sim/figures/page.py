"""Writes figures as PNG files and as one HTML page that holds all of them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from crux_torch.sim.figures.catalogue import Drawn, LeftOut, Plate
from crux_torch.sim.figures.style import SETTINGS
from crux_torch.sim.results import ResultError

COMMAND = "python benchmarks/{}.py --out {}"
PAGE = "figures.html"
_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
figure { margin: 2.5rem 0; }
img { max-width: 100%; height: auto; }
figcaption { font-size: 0.92rem; color: #333; max-width: 56rem; }
code { background: #f2f2f2; padding: 0.1em 0.3em; }
"""


def write(
    drawn: Sequence[Drawn], left_out: Sequence[LeftOut], folder: Path
) -> tuple[list[Path], Path]:
    """Writes a PNG for each figure, and the page; returns the PNGs and the page.

    Raises:
        ResultError: they can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        images = [_png(item) for item in drawn]
        files = [folder / f"{item.plate.name}.png" for item in drawn]
        for file, image in zip(files, images, strict=True):
            file.write_bytes(image)
        page = folder / PAGE
        page.write_text(_html(drawn, images, left_out), encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{folder}: can't be written: {error}") from None
    return files, page


def _png(item: Drawn) -> bytes:
    buffer = io.BytesIO()
    # No date and no version in the file: the same result gives the same bytes.
    with matplotlib.rc_context(SETTINGS):
        item.figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _html(drawn: Sequence[Drawn], images: Sequence[bytes], left_out: Sequence[LeftOut]) -> str:
    parts = [_figure(item, image) for item, image in zip(drawn, images, strict=True)]
    if left_out:
        items = "".join(
            f"<li>{_name(item.plate)}: {html.escape(item.reason)}.</li>" for item in left_out
        )
        parts.append(f"<h2>Not drawn</h2>\n<ul>{items}</ul>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>Crux: the evaluation's figures</title><style>{_CSS}</style></head>\n"
        f"<body>\n<h1>The evaluation's figures</h1>\n{body}\n</body>\n</html>\n"
    )


def _figure(item: Drawn, image: bytes) -> str:
    plate = item.plate
    data = base64.b64encode(image).decode("ascii")
    command = COMMAND.format(plate.benchmark, item.source.parent)
    if item.source.stem != plate.benchmark:
        command += f" --name {item.source.stem}"
    command = html.escape(command)
    return (
        f'<figure id="{plate.name}">\n<h2>{_name(plate)}</h2>\n'
        f'<img alt="{_name(plate)}" src="data:image/png;base64,{data}">\n'
        f"<figcaption><p>{html.escape(plate.caption)}</p>"
        f"<p><b>The paper:</b> {html.escape(plate.paper)}</p>"
        f"<p>Drawn from <code>{html.escape(item.source.name)}</code>, which "
        f"<code>{command}</code> writes.</p></figcaption>\n</figure>"
    )


def _name(plate: Plate) -> str:
    return f"Figure {plate.number}: {html.escape(plate.title)}"

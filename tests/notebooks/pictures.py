"""`python -m tests.notebooks.pictures NOTEBOOK ...` stores pictures without their paper, in tones that read on a light page and on a dark one."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

INK = 0.46
"""Lightness of the darkest tone: grey of it has a contrast of 4 and more with white and with JupyterLab's dark page."""


def without_paper(png: bytes) -> bytes:
    """Return a picture whose white is clear and whose dark tones are no darker than `INK`: on white it looks as before, but for these."""
    picture = Image.open(io.BytesIO(png))
    if picture.mode != "RGB" and np.asarray(picture.convert("RGBA"))[..., 3].min() < 255:
        return png  # it has none
    colors = np.asarray(picture.convert("RGB"), dtype=np.float64) / 255
    low, high = colors.min(-1, keepdims=True), colors.max(-1, keepdims=True)
    lightness = (low + high) / 2
    opaque = np.clip((1 - low) / (1 - INK), 0, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        lifted = np.where(lightness > 0, colors * INK / lightness, INK)
        tone = np.where(lightness < INK, lifted, 1 - (1 - colors) / opaque)
    out = np.concatenate([np.nan_to_num(tone), opaque], -1)
    buffer = io.BytesIO()
    Image.fromarray(np.uint8(np.clip(255 * out, 0, 255).round()), "RGBA").quantize(128).save(
        buffer, "png", optimize=True
    )
    return buffer.getvalue()


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for output in (output for cell in notebook["cells"] for output in cell.get("outputs", ())):
            data = output.get("data", {})
            if "image/png" in data:
                png = base64.b64decode("".join(data["image/png"]))
                data["image/png"] = base64.b64encode(without_paper(png)).decode()
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""What a panel shows: its words as plain text, and its picture as numbers."""

from __future__ import annotations

import io
import re
from html import unescape
from typing import Any

import numpy as np
from matplotlib import image


def said(panel: Any) -> str:
    """The words of a panel, without their markup."""
    (status,) = re.findall(r'<div role="status"[^>]*>(.*?)</div>', panel.words.value)
    return unescape(re.sub(r"<[^>]*>", "\n", status)).strip()


def pixels(png: bytes) -> np.ndarray:
    """A picture, shape (height, width, channels)."""
    return np.asarray(image.imread(io.BytesIO(png), format="png"))

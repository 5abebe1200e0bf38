"""Where to train: a device by name, checked before anything is written."""

from __future__ import annotations

import torch

from workbench.errors import DeviceError

__all__ = ["resolve_device"]


def resolve_device(device: str) -> torch.device:
    """Return the device; "auto" is the GPU where there is one.

    Raises:
        DeviceError: there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            f"device={device!r} is not known. Allowed: 'auto', 'cpu', 'cuda', 'mps', or one of several, as 'cuda:1'."
        ) from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device={device!r} was asked for, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices "
            "here. Use device='cpu' or 'auto', or install a CUDA build of torch."
        )
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(
            f"device={device!r} was asked for, but torch {torch.__version__} has none here. Use 'cpu' or 'auto'."
        )
    return resolved

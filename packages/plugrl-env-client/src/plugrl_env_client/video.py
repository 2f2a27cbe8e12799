"""Write videos frame by frame. The one file that needs imageio-ffmpeg."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_env_client.errors import MissingVideoExtraError

if TYPE_CHECKING:
    import pathlib

    import numpy.typing as npt

__all__ = ["VideoWriter", "require_video"]


def require_video() -> Any:
    """Import what writes videos.

    Raises:
        MissingVideoExtraError: it is not installed.
    """
    try:
        import imageio_ffmpeg
    except ModuleNotFoundError as error:
        raise MissingVideoExtraError from error
    return imageio_ffmpeg


class VideoWriter:
    """An H.264 video in the making; it appears under its name when it is closed.

    Frames go to the encoder as they come, so that memory does not grow with the episode. Odd sizes
    are padded by one line, which the pixel format needs.

    Args:
        path: ends in ``.mp4``.
        fps: frames per second.
    """

    def __init__(self, path: pathlib.Path, fps: float) -> None:
        self._ffmpeg = require_video()
        self._path = path
        self._partial = path.with_name(f".{path.name}")
        self._fps = fps
        self._stream: Any = None

    def add(self, frame: npt.NDArray[np.uint8]) -> None:
        """Add a frame, ``[h, w, c]`` with 1, 3 or 4 channels (any other number: the last one)."""
        channels = frame.shape[-1]
        if channels == 4:
            frame = frame[..., :3]
        elif channels != 3:
            frame = np.repeat(frame[..., -1:], 3, axis=-1)
        height, width = frame.shape[:2]
        if height % 2 or width % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)))
        if self._stream is None:
            size = (frame.shape[1], frame.shape[0])
            self._stream = self._ffmpeg.write_frames(
                str(self._partial), size, fps=self._fps, macro_block_size=1
            )
            self._stream.send(None)
        self._stream.send(np.ascontiguousarray(frame))

    def close(self, *, keep: bool = True) -> None:
        """Finish the video, or throw it away; nothing is left of one without frames."""
        if self._stream is None:
            return
        self._stream.close()
        if keep:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink(missing_ok=True)

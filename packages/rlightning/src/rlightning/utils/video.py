"""Write frames to an mp4 file, one at a time, so that memory stays flat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from rlightning.errors import ConfigError

if TYPE_CHECKING:
    import pathlib

    import numpy as np

__all__ = ["VideoWriter"]


class VideoWriter:
    """A context manager that encodes frames with ffmpeg; the file is playable even after an error.

    Args:
        path: the mp4 file; its folder is created.
        fps: frames per second.

    Raises:
        ConfigError: the extra ``video`` is not installed.
    """

    def __init__(self, path: pathlib.Path, *, fps: float) -> None:
        try:
            import imageio_ffmpeg
        except ImportError as error:
            raise ConfigError(
                "videos need the extra `video`: pip install 'rlightning[video]'"
            ) from error
        self._write_frames = imageio_ffmpeg.write_frames
        self._path = path
        self._fps = fps
        self._encoder: Any = None
        self.frames = 0
        """Frames written so far."""

    def write(self, frame: np.ndarray[Any, Any]) -> None:
        """Append a frame, uint8 ``[height, width, 3]``; odd sizes lose their last line."""
        frame = frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
        if self._encoder is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            size = frame.shape[1], frame.shape[0]
            self._encoder = self._write_frames(
                str(self._path), size, fps=self._fps, macro_block_size=2, quality=7
            )
            self._encoder.send(None)
        self._encoder.send(frame.tobytes())
        self.frames += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._encoder is not None:
            self._encoder.close()

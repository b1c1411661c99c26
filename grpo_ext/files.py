"""Files that are whole or not there."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A name beside `path` to write to; on success it takes the place of `path` in one step.

    Whoever is killed within, or runs out of disk, leaves what was at `path` before. The same name every time, so that nothing
    piles up: one writer to a file. What a link points to is replaced, not the link; a directory or a device (/dev/null, which root
    could take away from everyone) is refused with an OSError.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file, so none can take its place", str(path))
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())  # the name must not be on the disk before the bytes are
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    os.replace(unfinished, path)

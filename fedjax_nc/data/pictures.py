"""Images out of files: none is unpacked before its size is known to be sensible."""

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import store
from fedjax_nc.data.containers import MOST_BYTES, Container
from fedjax_nc.data.decoded import Room

MOST_SIDE = 2**14
MOST_PIXELS = 2**25
_FORMATS = ('PNG', 'JPEG', 'BMP', 'GIF', 'PPM', 'WEBP')
_ENDINGS = ('.png', '.jpg', '.jpeg', '.bmp', '.gif', '.ppm', '.pgm', '.webp')


def named(name: str) -> bool:
    """Whether a file is an image by its name."""
    return name.lower().endswith(_ENDINGS)


def decode(
    files: Container, splits: Sequence[Sequence[str]], sides: tuple[int, int] | None, channels: int, room: Room
) -> list[NDArray[np.uint8]]:
    """The images [n, H, W, channels] of the training and the test set.

    Args:
        files: where they lie.
        splits: their names.
        sides: height and width to which they are scaled; without it, they must be alike.
        channels: 3 or 1.
        room: where they are put.

    Raises:
        ValueError: if one is damaged, too large, or of another size than the first.
    """
    places = {name: (split, i) for split, names in enumerate(splits) for i, name in enumerate(names)}
    arrays: list[NDArray[np.uint8]] = []
    first, found, count = '', sides, 0
    with store.refusing(files.path, 'fetch it again'):
        contents = files.contents(places)
    while True:
        with store.refusing(files.path, 'fetch it again'):
            if (item := next(contents, None)) is None:
                break
        name, content = item
        with store.refusing(files.path / name, 'fetch it again, or remove it'):
            pixels = picture(content, sides, channels)
        if not arrays:
            first, found = name, pixels.shape[:2]
            kinds = zip(('x_train', 'x_test'), splits, strict=True)
            arrays = [room(field, (len(names), *pixels.shape)) for field, names in kinds]
        if pixels.shape[:2] != found:
            raise ValueError(
                f'{files.path / name} is {_said(pixels.shape)} and {first} is {_said(found)}: '
                'give a `size`, to which all are scaled'
            )
        split, i = places[name]
        arrays[split][i] = pixels
        count += 1
    if count != len(places):
        raise ValueError(f'{files.path} has changed while it was read: load again')
    return arrays


def picture(content: bytes, sides: tuple[int, int] | None = None, channels: int = 3) -> NDArray[np.uint8]:
    """One image [H, W, channels], turned upright as it says itself, and scaled to `sides` where they are given.

    Raises:
        Exception: of any kind, if it is none or too large.
    """
    from PIL import Image, ImageOps

    if len(content) > MOST_BYTES:
        raise ValueError(f'more than {MOST_BYTES} bytes')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', Image.DecompressionBombWarning)  # said of more pixels than are taken here
        image: Any = Image.open(io.BytesIO(content), formats=_FORMATS)
    if image.width * image.height > MOST_PIXELS or max(image.size) > MOST_SIDE:  # before it is unpacked
        raise ValueError(f'{image.width} x {image.height} pixels')
    if image.mode[0] in 'IF':  # what does not fit a byte would be cut off
        raise store.UnfitError(f'more than 8 bits a pixel, mode {image.mode}')
    if image.mode not in ('1', 'P') and _deep(image):
        raise store.UnfitError('more than 8 bits a colour')
    image = _upright(image).convert({1: 'L', 3: 'RGB'}[channels])
    if sides is not None and image.size != sides[::-1]:
        image = ImageOps.fit(image, sides[::-1], Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(image.height, image.width, channels)


def _deep(image: Any) -> bool:
    """Whether numbers of more than 8 bits would be cut to bytes, as the way in which a file is read says."""
    said = [part for tile in image.tile for part in (tile[3] if isinstance(tile[3], tuple) else (tile[3],))]
    wide = image.format == 'PPM' and any(isinstance(part, int) and part > 255 for part in said)
    return wide or any(isinstance(part, str) and ';16' in part for part in said)


def _upright(image: Any) -> Any:
    """What viewers show: cameras write pixels as their sensor lies, and beside them how it was held."""
    from PIL import ExifTags, Image

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # said of what is damaged beside the pixels, which does not matter
        try:
            held = image.getexif().get(ExifTags.Base.Orientation)
        except Exception:  # of any kind: where pixels are damaged, too, it comes again
            return image
    turns = Image.Transpose
    turn = {
        2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
        6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90,
    }.get(held if isinstance(held, int) else 1)  # fmt: skip
    return image if turn is None else image.transpose(turn)


def sides(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Height and width of images: one number is both.

    Raises:
        ValueError: if it is neither one nor two sensible numbers.
    """
    if size is None:
        return None
    both = (size, size) if not isinstance(size, Sequence) or isinstance(size, str) else tuple(size)
    if len(both) != 2:
        raise ValueError(f'`size` must be one side, or height and width, not {checks.shown(size)}.')
    for side in both:
        checks.whole('`size`', side)
        if side > MOST_SIDE:
            raise ValueError(f'`size` must be at most {MOST_SIDE}, not {side}.')
    return int(both[0]), int(both[1])


def _said(shape: tuple[int, ...] | None) -> str:
    return 'x'.join(str(side) for side in (shape or ())[:2])

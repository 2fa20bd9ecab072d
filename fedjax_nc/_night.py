"""What is drawn for a light page, in the colours of a dark one."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.artist import Artist

NIGHT, CHALK = '#14181e', '#f4f4f4'  # the ground of pydata's Sphinx themes, and black's counterpart


def inked(artist: 'Artist') -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """What in an artist and all that it is made of has a colour: (what sets it, the colour for dark pages)."""
    from matplotlib import collections, lines, patches, text

    if isinstance(artist, text.Text):
        yield artist.set_color, nightly(artist.get_color())
        within = (artist.get_bbox_patch(), getattr(artist, 'arrow_patch', None))
        for patch in within:
            if patch is not None:
                yield from inked(patch)
    elif isinstance(artist, lines.Line2D):
        for put, get in (
            (artist.set_color, artist.get_color),
            (artist.set_markerfacecolor, artist.get_markerfacecolor),
            (artist.set_markeredgecolor, artist.get_markeredgecolor),
            (artist.set_markerfacecoloralt, artist.get_markerfacecoloralt),
        ):
            yield put, nightly(get())
    elif isinstance(artist, patches.Patch):
        yield artist.set_edgecolor, nightly(artist.get_edgecolor())
        yield artist.set_facecolor, nightly(artist.get_facecolor())
    elif isinstance(artist, collections.Collection) and artist.get_array() is None:
        edges, faces = artist.get_edgecolor(), artist.get_facecolor()
        if len(edges):
            yield artist.set_edgecolor, [nightly(color) for color in edges]
        if len(faces):
            yield artist.set_facecolor, [nightly(color) for color in faces]
    scale = artist.get_label() == '<colorbar>'  # whose pointed ends have colours of the scale
    for child in artist.get_children():
        if not (scale and isinstance(child, patches.PathPatch)):
            yield from inked(child)


def nightly(color: Any) -> Any:
    """A colour as it is on dark pages."""
    from matplotlib.colors import to_rgb, to_rgba

    *rgb, alpha = to_rgba(color)
    if not alpha:
        return 'none'  # which an artist's own alpha leaves alone
    ground, chalk = np.array(to_rgb(NIGHT)), np.array(to_rgb(CHALK))
    shade = np.array(rgb)
    if np.ptp(shade) < 0.05:
        shade = ground + (chalk - ground) * (1 - shade.mean())
    else:
        while contrast(shade, ground) < 4.5:
            shade = shade + 0.05 * (1 - shade)
    return (*shade.tolist(), alpha)


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """Contrast of two colours, from 1 to 21, as accessibility guidelines (WCAG 2) have it."""

    def luminance(rgb: np.ndarray) -> float:
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    high, low = sorted((luminance(np.asarray(a)), luminance(np.asarray(b))), reverse=True)
    return (high + 0.05) / (low + 0.05)

"""Figures of data and results.

Every function returns a matplotlib `Figure` of its own, without pyplot and its global state: save it with
`figure.savefig(path)`; in a notebook it shows itself, after `%matplotlib inline`. matplotlib is imported when a figure
is made.

Figures are made for light pages, whatever matplotlib's settings are; `dark(figure)` is the same one for dark pages, and
`save` writes both. What bands, bars and boxes are stands below the axes.
"""

import pickle
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedjax_nc import checks
from fedjax_nc.base import FederatedData

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by all readers, darkest first; line style and marker repeat the distinction. The
# numbers of colours, dashes and markers have no common divisor: of any 35 curves, no two share two of the three.
_COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
_DASHES = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = 'osD^vPX*'
_FILLS = ('full', 'none', 'left')  # of markers: where colours come again, and once more
_HATCHES = ('', '//', '..', 'xx')  # of bars
_INK, _GRID, _PAPER = '#404040', '#e4e4e4', '#ffffff'
_NIGHT, _CHALK = '#14181e', '#f4f4f4'  # of dark pages: the ground of pydata's Sphinx themes, and black's counterpart


def class_distribution(
    data: FederatedData, kind: Literal['bubble', 'bars'] = 'bubble', *, class_names: Sequence[str] | None = None
) -> 'Figure':
    """Shows how many examples of each class each client holds.

    Args:
        data: any clients.
        kind: 'bubble' for one disc per client and class with area in proportion to the number of examples; 'bars' for
            one stacked bar per client.
        class_names: C names, numbers by default.

    Returns:
        The figure.

    Raises:
        ValueError: for another `kind`, or names that are not C.
        ImportError: without matplotlib.
    """
    if kind not in ('bubble', 'bars'):
        raise ValueError(f"`kind` must be 'bubble' or 'bars'; got {kind!r}.")
    checks.kind('data', data, FederatedData)
    counts = np.asarray(data.counts)
    clients, classes = counts.shape
    if class_names is not None and len(class_names) != classes:
        raise ValueError(f'{classes} class names needed; got {len(class_names)}.')
    names = [str(c) for c in range(classes)] if class_names is None else list(class_names)
    width = float(np.clip(2.4 + 0.22 * clients, 5, 14))
    if kind == 'bubble':
        figure, (axes,) = _figure(width, float(np.clip(1.4 + 0.24 * classes, 3, 9)))
        _bubbles(axes, counts, names)
    else:
        figure, (axes,) = _figure(width, 3.6)
        _bars(axes, counts, names)
    axes.set_xlabel('client')
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    return figure


def example_tiles(rows: Mapping[str, ArrayLike]) -> 'Figure':
    """Shows images in rows, such as a few of each client.

    Args:
        rows: name -> images [n, H, W] or [n, H, W, ch] with 1 or 3 channels, uint8 or floating in [0, 1], which all
            rows have of one size; what lies beyond is cut off. A row may be shorter than others.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no row or no image, or images are of another shape or type.
        ImportError: without matplotlib.
    """
    if not rows:
        raise ValueError('`rows` is empty: give at least one name -> images.')
    tiles = {name: np.asarray(images) for name, images in rows.items()}
    sizes = {images.shape[1:] if images.ndim == 4 else (*images.shape[1:], 1) for images in tiles.values()}
    if len(sizes) > 1 or any(len(size) != 3 or size[-1] not in (1, 3) for size in sizes):
        raise ValueError(f'`rows` must hold images [n, H, W, ch] of one size; got {sorted(sizes)}.')
    ((height, width, channels),) = sizes
    if other := [name for name, images in tiles.items() if images.dtype != np.uint8 and images.dtype.kind != 'f']:
        raise ValueError(f'images must be uint8 or floating; {other[0]!r} has {tiles[other[0]].dtype}.')
    most = max(len(images) for images in tiles.values())
    if not most:
        raise ValueError('`rows` has no images.')
    canvas = np.ones((len(tiles) * (height + 1) - 1, most * (width + 1) - 1, 4))
    canvas[..., 3] = 0  # the page shows between the tiles
    for i, images in enumerate(tiles.values()):
        seen = images / 255 if images.dtype == np.uint8 else np.clip(images, 0, 1)
        for j, image in enumerate(seen.reshape(len(images), height, width, channels)):
            place = canvas[i * (height + 1) :, j * (width + 1) :][:height, :width]
            place[..., :3], place[..., 3] = image, 1
    figure, (axes,) = _figure(0.45 * most * width / height + 1.2, 0.45 * len(tiles) + 0.3)
    axes.imshow(canvas, interpolation='nearest')
    axes.set_xticks([])
    axes.set_yticks([i * (height + 1) + (height - 1) / 2 for i in range(len(tiles))], labels=list(tiles))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


Curves = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""name -> (rounds [R], values [R] or [seeds, R])."""


def accuracy_curves(
    curves: Curves,
    *,
    xlabel: str = 'communication round',
    ylabel: str = 'test accuracy [%]',
    title: str | None = None,
    percent: bool = True,
) -> 'Figure':
    """Draws accuracy over communication rounds, one line per name.

    Args:
        curves: name -> (rounds [R], accuracy [R] or [seeds, R]). Several seeds become their mean in a band of one
            standard deviation (ddof 0) to either side, as a line below the axes says. Up to 35 curves look different
            in two of colour, dashes and markers at least.
        xlabel: label of the horizontal axis.
        ylabel: label of the vertical axis.
        title: title, none by default.
        percent: whether accuracy comes in [0, 1] and is to be shown in percent.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no curve, or rounds and accuracy do not match.
        ImportError: without matplotlib.
    """
    figure, (axes,) = _figure(6.4, 4.0)
    seeds = _curves(axes, curves, 100 if percent else 1)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title, color=_INK)
    _legend(figure, [axes], 6)
    _note_seeds(figure, 'Lines', 'bands', seeds)
    return figure


def curve_panels(panels: Mapping[str, Curves], *, xlabel: str = 'communication round') -> 'Figure':
    """Draws several measures over communication rounds, one panel each; the first has the legend for all.

    Args:
        panels: title -> curves, as for `accuracy_curves`.
        xlabel: label of the horizontal axes.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no panel or a panel has no curve, or rounds and values do not match.
        ImportError: without matplotlib.
    """
    figure, row = _figure(3.1, 2.7, len(panels))
    ranks, seeds = _ranks(panels), set()
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        seeds |= _curves(axes, curves, ranks=ranks)
        axes.set_xlabel(xlabel)
        axes.set_title(title, fontsize=10, color=_INK)
    _legend(figure, row, 3)
    _note_seeds(figure, 'Lines', 'bands', seeds)
    return figure


def heat_maps(
    panels: Mapping[str, ArrayLike],
    *,
    xlabel: str = 'class',
    ylabel: str = 'client',
    limits: tuple[float, float] | None = None,
    label: str | None = None,
) -> 'Figure':
    """Draws matrices side by side as heat maps, dark for small values.

    Args:
        panels: title -> matrix [rows, columns].
        xlabel: what the columns are.
        ylabel: what the rows are.
        limits: (low, high) of one colour scale for all; by default each has its own, from its least to its greatest.
        label: what the colours are, beside every colour bar; by default the titles, and 'value' for one scale of
            several panels.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no panel, or one is no matrix.
        ImportError: without matplotlib.
    """
    matrices = {title: np.asarray(values, float) for title, values in panels.items()}
    for title, values in matrices.items():
        if values.ndim != 2 or not values.size:
            raise ValueError(f'{title!r} needs a matrix; got shape {values.shape}.')
    rows, columns = next(iter(matrices.values()), np.zeros((1, 1))).shape
    cell = float(np.clip(3.2 / max(rows, columns), 0.05, 0.3))
    figure, row = _figure(max(cell * columns, 1.6) + 1.1, max(cell * rows, 1.6) + 1.0, len(matrices))
    low, high = limits or (None, None)
    for axes, (title, values) in zip(row, matrices.items(), strict=True):
        image = axes.imshow(values, aspect='auto', interpolation='nearest', cmap='viridis', vmin=low, vmax=high)
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=10, color=_INK)
        axes.set_xlabel(xlabel)
        for set_ticks, number in ((axes.set_yticks, len(values)), (axes.set_xticks, values.shape[1])):
            _ticks(set_ticks, [str(i) for i in range(number)])
        if limits is None or axes is row[-1]:
            named = label or (title if limits is None or len(row) == 1 else 'value')
            bar = figure.colorbar(image, ax=axes if limits is None else row, pad=0.02)
            bar.set_label(named, color=_INK, fontsize=8)
            bar.ax.set_facecolor(_PAPER)
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0, labelsize=8, colors=_INK)
    row[0].set_ylabel(ylabel)
    return figure


def grouped_bars(
    panels: Mapping[str, Mapping[str, ArrayLike]], groups: Sequence[str], *, ylabel: str = 'test accuracy [%]'
) -> 'Figure':
    """Draws a bar for each name in each group, with a line of one standard deviation over seeds to either side.

    Args:
        panels: title -> name -> values [G] or [seeds, G]. Several seeds become their mean with a line of one standard
            deviation (ddof 0) to either side, as a line below the axes says.
        groups: names of the G groups, such as 'many', 'medium', 'few'.
        ylabel: label of the vertical axis.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no panel, or values are not as many as groups.
        ImportError: without matplotlib.
    """
    ranks, seeds = _ranks(panels), set()
    names = len(ranks)
    figure, row = _figure(max(2.6, 0.16 * names * len(groups) + 1.4), 2.9, len(panels))
    for axes, (title, bars) in zip(row, panels.items(), strict=True):
        width = 0.8 / max(names, 1)
        for name, values in bars.items():
            i = ranks[name]
            y = np.atleast_2d(np.asarray(values, float))
            if y.ndim != 2 or y.shape[1] != len(groups):
                raise ValueError(f'{name!r} needs {len(groups)} values, or [seeds, {len(groups)}]; got {y.shape}.')
            x = np.arange(len(groups)) + (i - (names - 1) / 2) * width
            hatch = _HATCHES[i // len(_COLORS) % len(_HATCHES)]  # where colours come again
            color = _COLORS[i % len(_COLORS)]
            axes.bar(x, y.mean(0), 0.92 * width, label=name, color=color, hatch=hatch, edgecolor=_PAPER, linewidth=0)
            if len(y) > 1:
                axes.errorbar(x, y.mean(0), y.std(0), fmt='none', ecolor=_INK, elinewidth=1)
                seeds.add(len(y))
        axes.set_xticks(range(len(groups)), labels=list(groups))
        axes.set_title(title, fontsize=10, color=_INK)
        axes.grid(axis='y', color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    row[0].set_ylabel(ylabel)
    _legend(figure, row, 0, length=2)
    _note_seeds(figure, 'Bars', 'lines', seeds)
    return figure


def boxes(panels: Mapping[str, Mapping[str, ArrayLike]], *, ylabel: str = 'test accuracy [%]') -> 'Figure':
    """Draws how values are spread, of clients for instance: a violin with a box in it for each name.

    The violin goes from the least value to the greatest and is as wide as values are dense; the box goes from the first
    to the third quartile, with a line at the median. A line below the axes says so.

    Args:
        panels: title -> name -> values [n], of which NaN and infinity are left out.
        ylabel: label of the vertical axis.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no panel, or a name has no values.
        ImportError: without matplotlib.
    """
    ranks = _ranks(panels)
    names = max((len(spread) for spread in panels.values()), default=0)
    figure, row = _figure(max(3.0, 0.75 * names + 0.8), 3.0, len(panels))
    for axes, (title, spread) in zip(row, panels.items(), strict=True):
        for i, (name, given) in enumerate(spread.items()):
            values = np.asarray(given, float)
            values = values[np.isfinite(values)]
            if not values.size:
                raise ValueError(f'{name!r} has no values to draw.')
            color = _COLORS[ranks[name] % len(_COLORS)]
            if np.ptp(values) > 0:
                for body in axes.violinplot(values, [i], widths=0.8, showextrema=False)['bodies']:  # type: ignore[attr-defined]
                    body.set_facecolor(color)
                    body.set_alpha(0.3)
            drawn = axes.boxplot(values, positions=[i], widths=0.18, showfliers=False, whis=0, showcaps=False)
            for part in ('boxes', 'medians', 'whiskers'):
                for line in drawn[part]:
                    line.set_color(color)
        axes.set_xticks(range(len(spread)), labels=list(spread), rotation=30, ha='right')
        axes.set_title(title, fontsize=10, color=_INK)
        axes.grid(axis='y', color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    row[0].set_ylabel(ylabel)
    _note(figure, 'Shapes: as wide as values are dense. Boxes: from the first to the third quartile, with the median.')
    return figure


def dark(figure: 'Figure') -> 'Figure':
    """The same figure for a dark page.

    White becomes the ground of the page, black becomes white, and greys what lies between; colours stay, those too dark
    for the ground somewhat lighter. Images and what is coloured by numbers stay as they are. It works for any figure
    that can be pickled, also one that was not made here.

    Args:
        figure: a figure for a light page, which is left as it is.

    Returns:
        Another figure.

    Raises:
        ValueError: if the figure cannot be copied, which pickle does; a function without a name in it, such as a
            formatter, cannot be.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    try:
        copy = pickle.loads(pickle.dumps(figure))  # `copy.deepcopy` misplaces colour bars
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f'this figure cannot be copied: {error}') from error
    FigureCanvasAgg(copy)
    inked = list(_inked(copy))
    for axes in copy.axes:  # ticks that are still to come
        for axis in (axes.xaxis, axes.yaxis):
            for tick in axis.get_major_ticks()[:1]:
                axis.set_tick_params(
                    which='both',
                    color=_nightly(tick.tick1line.get_color()),
                    labelcolor=_nightly(tick.label1.get_color()),
                    grid_color=_nightly(tick.gridline.get_color()),
                )
    for put, colors in inked:
        put(colors)
    return copy


def save(figure: 'Figure', path: str | Path, *, dpi: float = 100) -> tuple[Path, Path]:
    """Writes a figure for light pages to `path`, and for dark ones beside it, as `NAME-dark` with the same ending.

    Args:
        figure: a figure for a light page.
        path: where to, such as `accuracy.png`; its folder must exist.
        dpi: dots per inch, of formats that have any.

    Returns:
        Both paths.

    Raises:
        OSError: if they cannot be written.
        ValueError: for a format that matplotlib does not write, or as `dark`.
    """
    path = Path(path)
    both = path, path.with_stem(f'{path.stem}-dark')
    for each, target in zip((figure, dark(figure)), both, strict=True):
        each.savefig(target, dpi=dpi, facecolor=each.get_facecolor())
    return both


def _inked(artist: 'Artist') -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """What in an artist and all that it is made of has a colour: (what sets it, the colour for dark pages)."""
    from matplotlib import collections, lines, patches, text

    if isinstance(artist, text.Text):
        yield artist.set_color, _nightly(artist.get_color())
        within = (artist.get_bbox_patch(), getattr(artist, 'arrow_patch', None))
        for patch in within:
            if patch is not None:
                yield from _inked(patch)
    elif isinstance(artist, lines.Line2D):
        for put, get in (
            (artist.set_color, artist.get_color),
            (artist.set_markerfacecolor, artist.get_markerfacecolor),
            (artist.set_markeredgecolor, artist.get_markeredgecolor),
            (artist.set_markerfacecoloralt, artist.get_markerfacecoloralt),
        ):
            yield put, _nightly(get())
    elif isinstance(artist, patches.Patch):
        yield artist.set_edgecolor, _nightly(artist.get_edgecolor())
        yield artist.set_facecolor, _nightly(artist.get_facecolor())
    elif isinstance(artist, collections.Collection) and artist.get_array() is None:
        edges, faces = artist.get_edgecolor(), artist.get_facecolor()
        if len(edges):
            yield artist.set_edgecolor, [_nightly(color) for color in edges]
        if len(faces):
            yield artist.set_facecolor, [_nightly(color) for color in faces]
    scale = artist.get_label() == '<colorbar>'  # whose pointed ends have colours of the scale
    for child in artist.get_children():
        if not (scale and isinstance(child, patches.PathPatch)):
            yield from _inked(child)


def _nightly(color: Any) -> Any:
    """A colour as it is on dark pages."""
    from matplotlib.colors import to_rgb, to_rgba

    *rgb, alpha = to_rgba(color)
    if not alpha:
        return 'none'  # which an artist's own alpha leaves alone
    ground, chalk = np.array(to_rgb(_NIGHT)), np.array(to_rgb(_CHALK))
    shade = np.array(rgb)
    if np.ptp(shade) < 0.05:
        shade = ground + (chalk - ground) * (1 - shade.mean())
    else:
        while _contrast(shade, ground) < 4.5:
            shade = shade + 0.05 * (1 - shade)
    return (*shade.tolist(), alpha)


def _contrast(a: np.ndarray, b: np.ndarray) -> float:
    """Contrast of two colours, from 1 to 21, as accessibility guidelines (WCAG 2) have it."""

    def luminance(rgb: np.ndarray) -> float:
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    high, low = sorted((luminance(np.asarray(a)), luminance(np.asarray(b))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _ranks(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The names of all panels in order: one looks the same wherever it is drawn."""
    return {name: i for i, name in enumerate(dict.fromkeys(name for panel in panels.values() for name in panel))}


def _curves(axes: 'Axes', curves: Curves, scale: float = 1, ranks: Mapping[str, int] | None = None) -> set[int]:
    """Draws the lines, and returns of how many seeds those with a band are."""
    if not isinstance(curves, Mapping) or not curves:
        found = 'is empty' if isinstance(curves, Mapping) else f'is {checks.shown(curves)}'
        raise ValueError(f'`curves` {found}: give at least one name -> (rounds, accuracy).')
    ranks, seeds = ranks or _ranks({'': curves}), set()
    for name, curve in curves.items():
        if len(curve) != 2:
            raise ValueError(f'{name!r} needs two things, rounds [R] and accuracy [R] or [seeds, R]; got {len(curve)}.')
        (rounds, values), i = curve, ranks[name]
        x, y = np.asarray(rounds), np.atleast_2d(np.asarray(values, float)) * scale
        if x.ndim != 1 or y.ndim != 2 or y.shape[1] != len(x):
            raise ValueError(
                f'{name!r} needs rounds [R] and accuracy [R] or [seeds, R]; got {x.shape} and {np.shape(values)}.'
            )
        mean, color = y.mean(0), _COLORS[i % len(_COLORS)]
        # eight markers from left to right, each curve's at places of its own: those on top of each other stay visible
        places = (np.arange(8) + i / max(len(ranks), 1)) / 8
        axes.plot(
            x,
            mean,
            label=name,
            color=color,
            linestyle=_DASHES[i % len(_DASHES)],
            linewidth=1.8,
            marker=_MARKERS[i % len(_MARKERS)],
            fillstyle=_FILLS[i // len(_COLORS) % len(_FILLS)],
            markersize=5,
            markevery=_nearest(x, places),
        )
        if len(y) > 1:
            axes.fill_between(x, mean - y.std(0), mean + y.std(0), color=color, alpha=0.18, linewidth=0)
            seeds.add(len(y))
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    return seeds


def _nearest(x: np.ndarray, places: np.ndarray) -> list[int]:
    """The points nearest to some places between the least (0) and the greatest (1)."""
    if not x.size:
        return []
    return np.unique(np.abs(x[:, None] - (x.min() + np.ptp(x) * places)).argmin(axis=0)).tolist()


def _note_seeds(figure: 'Figure', middle: str, around: str, seeds: Iterable[int]) -> None:
    """Says what is drawn of several seeds, if anything is."""
    numbers = sorted(seeds)
    if numbers:
        many = str(numbers[0]) if len(numbers) == 1 else f'{numbers[0]} to {numbers[-1]}'
        _note(figure, f'{middle}: means over {many} seeds; {around}: one standard deviation to either side.')


def _note(figure: 'Figure', text: str) -> None:
    """A line below the axes, in as many lines as it needs."""
    size = 8
    lines = textwrap.wrap(text, int(figure.get_figwidth() * 72 / (0.52 * size)))
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.13 * len(lines))
    figure.supxlabel('\n'.join(lines), fontsize=size, color=_INK)


def _figure(width: float, height: float, columns: int = 1) -> tuple['Figure', list['Axes']]:
    """A row of axes, each of the given inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "fedjax_nc[examples]"') from error
    if columns < 1:
        raise ValueError('`panels` is empty: give at least one title.')
    figure = Figure(figsize=(width * columns, height), dpi=150, layout='constrained', facecolor=_PAPER)
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    row = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in row:
        axes.spines[['top', 'right']].set_visible(False)
        axes.spines[['left', 'bottom']].set_color(_INK)
        axes.tick_params(colors=_INK)
        axes.set_facecolor(_PAPER)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(_INK)
    return figure, row


def _entries(row: Sequence['Axes']) -> tuple[list[Any], list[str]]:
    """What legends of several axes tell, each name once."""
    found = {label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(found.values()), list(found)


def _legend(figure: 'Figure', row: Sequence['Axes'], most: int, length: float = 3) -> None:
    """One legend for several axes: in the first of them, or beside them where more entries would hide too much."""
    handles, labels = _entries(row)
    if len(labels) <= most:
        row[0].legend(
            handles, labels, loc='best', framealpha=0.9, facecolor=_PAPER, edgecolor='none', labelcolor=_INK,
            handlelength=length,
        )  # fmt: skip
        return
    columns, size = 1 + len(labels) // 20, 10 if len(labels) < 13 else 8
    wide = columns * (0.35 + (length + 0.58 * max(map(len, labels), default=0)) * size / 72)  # about so many inches
    figure.set_figwidth(figure.get_figwidth() + wide)
    figure.legend(
        handles, labels, loc='outside right upper', frameon=False, labelcolor=_INK, fontsize=size, ncols=columns,
        handlelength=length,
    )  # fmt: skip


def _bubbles(axes: 'Axes', counts: np.ndarray, names: list[str]) -> None:
    clients, classes = counts.shape
    k, c = np.nonzero(counts)
    figure = axes.get_figure()
    assert figure is not None
    inches = figure.get_size_inches()  # type: ignore[union-attr]
    # the largest disc just fits the cell of one client and one class, unless it were too small to see; in points
    diameter = max(68 * min((inches[0] - 1.3) / (clients + 0.6), (inches[1] - 1.0) / (classes + 0.6)), 14)
    area = counts[k, c] / max(counts.max(), 1) * diameter**2
    axes.scatter(k, c, s=area, color=_COLORS[0], alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, clients - 0.2)
    axes.set_ylim(-0.8, classes - 0.2)
    axes.set_ylabel('class')
    _ticks(axes.set_yticks, names)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(f'area: examples, at most {counts.max():,} of one class on a client', fontsize=9, color=_INK)


def _bars(axes: 'Axes', counts: np.ndarray, names: list[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import BoundaryNorm

    clients, classes = counts.shape
    # an ordered map stays readable for any number of classes and without colour vision
    colors, norm = colormaps['viridis'].resampled(classes), BoundaryNorm(np.arange(classes + 1) - 0.5, classes)
    k, c = np.nonzero(counts)
    tops = counts.cumsum(1)
    left, right, low, high = k - 0.425, k + 0.425, (tops - counts)[k, c], tops[k, c]
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    # one collection: `bar` makes an artist per block, seconds of work for many clients and classes
    axes.add_collection(PolyCollection(list(corners), array=c, cmap=colors, norm=norm, linewidths=0))
    axes.set_xlim(-0.8, clients - 0.2)
    axes.set_ylim(0, max(1.05 * tops.max(), 1))
    axes.set_ylabel('examples')
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=axes, pad=0.02)
    bar.set_label('class', color=_INK)
    bar.ax.set_facecolor(_PAPER)
    _ticks(bar.set_ticks, names)
    bar.minorticks_off()
    bar.ax.tick_params(length=0, colors=_INK)
    bar.outline.set_visible(False)


def _ticks(set_ticks: Any, names: list[str]) -> None:
    step = next((n for n in (1, 2, 5, 10, 20, 50, 100) if len(names) <= 12 * n), 200)
    shown = range(0, len(names), step)
    set_ticks(list(shown), labels=[names[c] for c in shown])

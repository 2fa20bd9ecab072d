"""Figures of data and results.

Every function returns a matplotlib `Figure` of its own, without pyplot and its global state: save it with
`figure.savefig(path)`; in a notebook it shows itself, after `%matplotlib inline`. matplotlib is imported when a figure
is made.

Figures are made for light pages, whatever matplotlib's settings are; `dark(figure)` is the same one for dark pages, and
`save` writes both. What bands, bars and boxes are stands below the axes.
"""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedjax_nc import _canvas, _night, checks
from fedjax_nc.base import FederatedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        figure, (axes,) = _canvas.axes_in_a_row(width, float(np.clip(1.4 + 0.24 * classes, 3, 9)))
        _bubbles(axes, counts, names)
    else:
        figure, (axes,) = _canvas.axes_in_a_row(width, 3.6)
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
    figure, (axes,) = _canvas.axes_in_a_row(0.45 * most * width / height + 1.2, 0.45 * len(tiles) + 0.3)
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
        ValueError: if there is no curve, rounds and accuracy do not match, or it is in percent in spite of `percent`.
        ImportError: without matplotlib.
    """
    figure, (axes,) = _canvas.axes_in_a_row(6.4, 4.0)
    seeds = _curves(axes, curves, 100 if percent else 1)
    if percent and any(np.nanmax(line.get_ydata(), initial=0) > 200 for line in axes.get_lines()):
        raise ValueError('accuracy is far above 1, in percent already: say percent=False')
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title, color=_canvas.INK)
    _canvas.legend(figure, [axes], 6)
    _canvas.note_seeds(figure, 'Lines', 'bands', seeds)
    return figure


def curve_panels(panels: Mapping[str, Curves], *, xlabel: str = 'communication round') -> 'Figure':
    """Draws several measures over communication rounds, one panel each, with one legend for all.

    Args:
        panels: title -> curves, as for `accuracy_curves`.
        xlabel: label of the horizontal axes.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no panel or a panel has no curve, or rounds and values do not match.
        ImportError: without matplotlib.
    """
    if not isinstance(panels, Mapping) or not all(isinstance(curves, Mapping) for curves in panels.values()):
        raise ValueError(f'`panels` must be title -> name -> (rounds, values), not {checks.shown(panels)}.')
    figure, row = _canvas.axes_in_a_row(3.1, 2.7, len(panels))
    ranks, seeds = _canvas.ranks(panels), set()
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        seeds |= _curves(axes, curves, ranks=ranks)
        axes.set_xlabel(xlabel)
        axes.set_title(title, fontsize=10, color=_canvas.INK)
    _canvas.legend(figure, row, 3)
    _canvas.note_seeds(figure, 'Lines', 'bands', seeds)
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
    figure, row = _canvas.axes_in_a_row(max(cell * columns, 1.6) + 1.1, max(cell * rows, 1.6) + 1.0, len(matrices))
    low, high = limits or (None, None)
    for axes, (title, values) in zip(row, matrices.items(), strict=True):
        image = axes.imshow(values, aspect='auto', interpolation='nearest', cmap='viridis', vmin=low, vmax=high)
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=10, color=_canvas.INK)
        axes.set_xlabel(xlabel)
        for set_ticks, number in ((axes.set_yticks, len(values)), (axes.set_xticks, values.shape[1])):
            _canvas.ticks(set_ticks, [str(i) for i in range(number)])
        if limits is None or axes is row[-1]:
            named = label or (title if limits is None or len(row) == 1 else 'value')
            bar = figure.colorbar(image, ax=axes if limits is None else row, pad=0.02)
            bar.set_label(named, color=_canvas.INK, fontsize=8)
            bar.ax.set_facecolor(_canvas.PAPER)
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0, labelsize=8, colors=_canvas.INK)
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
    ranks, seeds = _canvas.ranks(panels), set()
    names = len(ranks)
    figure, row = _canvas.axes_in_a_row(max(2.6, 0.16 * names * len(groups) + 1.4), 2.9, len(panels))
    for axes, (title, bars) in zip(row, panels.items(), strict=True):
        width = 0.8 / max(names, 1)
        for name, values in bars.items():
            i = ranks[name]
            y = np.atleast_2d(np.asarray(values, float))
            if y.ndim != 2 or y.shape[1] != len(groups):
                raise ValueError(f'{name!r} needs {len(groups)} values, or [seeds, {len(groups)}]; got {y.shape}.')
            x = np.arange(len(groups)) + (i - (names - 1) / 2) * width
            hatch = _canvas.HATCHES[i // len(_canvas.COLORS) % len(_canvas.HATCHES)]  # where colours come again
            color = _canvas.COLORS[i % len(_canvas.COLORS)]
            axes.bar(
                x, y.mean(0), 0.92 * width, label=_canvas.label(name), color=color, hatch=hatch,
                edgecolor=_canvas.PAPER, linewidth=0,
            )  # fmt: skip
            if len(y) > 1:
                axes.errorbar(x, y.mean(0), y.std(0), fmt='none', ecolor=_canvas.INK, elinewidth=1)
                seeds.add(len(y))
        axes.set_xticks(range(len(groups)), labels=list(groups))
        axes.set_title(title, fontsize=10, color=_canvas.INK)
        axes.grid(axis='y', color=_canvas.GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    row[0].set_ylabel(ylabel)
    _canvas.legend(figure, row, 0, length=2)
    _canvas.note_seeds(figure, 'Bars', 'lines', seeds)
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
    ranks = _canvas.ranks(panels)
    names = max((len(spread) for spread in panels.values()), default=0)
    figure, row = _canvas.axes_in_a_row(max(3.0, 0.75 * names + 0.8), 3.0, len(panels))
    for axes, (title, spread) in zip(row, panels.items(), strict=True):
        for i, (name, given) in enumerate(spread.items()):
            values = np.asarray(given, float)
            values = values[np.isfinite(values)]
            if not values.size:
                raise ValueError(f'{name!r} has no values to draw.')
            color = _canvas.COLORS[ranks[name] % len(_canvas.COLORS)]
            if np.ptp(values) > 0:
                for body in axes.violinplot(values, [i], widths=0.8, showextrema=False)['bodies']:  # type: ignore[attr-defined]
                    body.set_facecolor(color)
                    body.set_alpha(0.3)
            drawn = axes.boxplot(values, positions=[i], widths=0.18, showfliers=False, whis=0, showcaps=False)
            for part in ('boxes', 'medians', 'whiskers'):
                for line in drawn[part]:
                    line.set_color(color)
        axes.set_xticks(range(len(spread)), labels=list(spread), rotation=30, ha='right')
        axes.set_title(title, fontsize=10, color=_canvas.INK)
        axes.grid(axis='y', color=_canvas.GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    row[0].set_ylabel(ylabel)
    _canvas.note(
        figure, 'Shapes: as wide as values are dense. Boxes: from the first to the third quartile, with the median.'
    )
    return figure


def points(panels: Mapping[str, tuple[ArrayLike, ArrayLike]], *, class_names: Sequence[str] | None = None) -> 'Figure':
    """Draws points of classes, such as features of `evaluate.features` in the two dimensions of t-SNE or a plane.

    Up to 20 classes have a colour and a mark each, and a legend; more have an order of colours, and a bar beside them.
    Axes have no numbers, and the same scale in both directions.

    Args:
        panels: title -> (places [n, 2], labels [n] int in [0, C)).
        class_names: C names; by default numbers, as many as the labels need.

    Returns:
        The figure.

    Raises:
        ValueError: if there is no panel, or for places or labels of other shapes, or a label without a name.
        ImportError: without matplotlib.

    Example:
      >>> import numpy as np
      >>> from fedjax_nc import plots
      >>> z, y = np.random.default_rng(0).normal(size=(30, 5)), np.arange(30) % 3
      >>> _, _, axes = np.linalg.svd(z - z.mean(0), full_matrices=False)  # principal ones first
      >>> figure = plots.points({'features': (z @ axes[:2].T, y)}, class_names=['cat', 'dog', 'eel'])
      >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
      ['cat', 'dog', 'eel']
    """
    read = {title: _places(title, *given) for title, given in panels.items()}
    most = max((int(labels.max(initial=-1)) for _, labels in read.values()), default=-1) + 1
    names = [str(c) for c in range(most)] if class_names is None else [str(name) for name in class_names]
    if most > len(names):
        raise ValueError(f'a label is {most - 1}, and there are {len(names)} class names.')
    figure, row = _canvas.axes_in_a_row(3.3, 3.3, len(read))
    for axes, (title, (places, labels)) in zip(row, read.items(), strict=True):
        if len(names) > 20:
            drawn = axes.scatter(
                places[:, 0], places[:, 1], c=labels, cmap='viridis', vmin=0, vmax=len(names) - 1, s=8, linewidths=0
            )
        for c in np.unique(labels) if len(names) <= 20 else ():
            x, y = places[labels == c].T
            axes.scatter(
                x, y, s=11, alpha=0.65, linewidths=0, label=_canvas.label(names[c]),
                color=_canvas.TEN[c % len(_canvas.TEN)], marker=_canvas.MARKERS[c % len(_canvas.MARKERS)],
            )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        axes.set_aspect('equal', adjustable='datalim')
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=10, color=_canvas.INK)
    if len(names) > 20:
        _canvas.class_bar(figure, drawn, row, names)
    else:
        _canvas.legend(figure, row, 3, length=1)
    return figure


def _places(title: str, places: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Points and their labels as arrays; refused if they are none."""
    where, which = np.asarray(places, float), np.asarray(labels)
    if where.ndim != 2 or where.shape[1] != 2 or which.shape != (len(where),):
        raise ValueError(f'{title!r} needs places [n, 2] and labels [n]; shapes: {where.shape} and {which.shape}.')
    if not np.issubdtype(which.dtype, np.integer) or which.min(initial=0) < 0:
        raise ValueError(f'{title!r} needs labels that are whole numbers from 0.')
    return where, which.astype(np.intp)


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
    inked = list(_night.inked(copy))
    for axes in copy.axes:  # ticks that are still to come
        for axis in (axes.xaxis, axes.yaxis):
            for tick in axis.get_major_ticks()[:1]:
                axis.set_tick_params(
                    which='both',
                    color=_night.nightly(tick.tick1line.get_color()),
                    labelcolor=_night.nightly(tick.label1.get_color()),
                    grid_color=_night.nightly(tick.gridline.get_color()),
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
        ValueError: without an ending, for a format that matplotlib does not write, or as `dark`.
    """
    path = Path(path)
    if not path.suffix:
        raise ValueError(f'{path} names no format: give it an ending, such as {path.name}.png')
    both = path, path.with_stem(f'{path.stem}-dark')
    for each, target in zip((figure, dark(figure)), both, strict=True):
        each.savefig(target, dpi=dpi, facecolor=each.get_facecolor())
    return both


def _curves(axes: 'Axes', curves: Curves, scale: float = 1, ranks: Mapping[str, int] | None = None) -> set[int]:
    """Draws the lines, and returns of how many seeds those with a band are."""
    if not isinstance(curves, Mapping) or not curves:
        found = 'is empty' if isinstance(curves, Mapping) else f'is {checks.shown(curves)}'
        raise ValueError(f'`curves` {found}: give at least one name -> (rounds, accuracy).')
    ranks, seeds = ranks or _canvas.ranks({'': curves}), set()
    for name, curve in curves.items():
        parts = len(curve) if hasattr(curve, '__len__') else 0
        if parts != 2:
            got = parts or checks.shown(curve)
            raise ValueError(f'{name!r} needs two things, rounds [R] and accuracy [R] or [seeds, R]; got {got}.')
        (rounds, values), i = curve, ranks[name]
        x, y = np.asarray(rounds), np.atleast_2d(np.asarray(values, float)) * scale
        if x.ndim != 1 or y.ndim != 2 or y.shape[1] != len(x) or not len(y):
            raise ValueError(
                f'{name!r} needs rounds [R] and accuracy [R] or [seeds, R]; shapes: {x.shape} and {np.shape(values)}.'
            )
        mean, color = y.mean(0), _canvas.COLORS[i % len(_canvas.COLORS)]
        # eight markers from left to right, each curve's at places of its own: those on top of each other stay visible
        places = (np.arange(8) + i / max(len(ranks), 1)) / 8
        axes.plot(
            x,
            mean,
            label=_canvas.label(name),
            color=color,
            linestyle=_canvas.DASHES[i % len(_canvas.DASHES)],
            linewidth=1.8,
            marker=_canvas.MARKERS[i % len(_canvas.MARKERS)],
            fillstyle=_canvas.FILLS[i // len(_canvas.COLORS) % len(_canvas.FILLS)],
            markersize=5,
            markevery=_nearest(x, places),
        )
        if len(y) > 1:
            axes.fill_between(x, mean - y.std(0), mean + y.std(0), color=color, alpha=0.18, linewidth=0)
            seeds.add(len(y))
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.grid(color=_canvas.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    return seeds


def _nearest(x: np.ndarray, places: np.ndarray) -> list[int]:
    """The points nearest to some places between the least (0) and the greatest (1)."""
    if not x.size:
        return []
    return np.unique(np.abs(x[:, None] - (x.min() + np.ptp(x) * places)).argmin(axis=0)).tolist()


def _bubbles(axes: 'Axes', counts: np.ndarray, names: list[str]) -> None:
    clients, classes = counts.shape
    k, c = np.nonzero(counts)
    figure = axes.get_figure()
    assert figure is not None
    inches = figure.get_size_inches()  # type: ignore[union-attr]
    # the largest disc just fits the cell of one client and one class, unless it were too small to see; in points
    diameter = max(68 * min((inches[0] - 1.3) / (clients + 0.6), (inches[1] - 1.0) / (classes + 0.6)), 14)
    area = counts[k, c] / max(counts.max(), 1) * diameter**2
    axes.scatter(k, c, s=area, color=_canvas.COLORS[0], alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, clients - 0.2)
    axes.set_ylim(-0.8, classes - 0.2)
    axes.set_ylabel('class')
    _canvas.ticks(axes.set_yticks, names)
    axes.grid(color=_canvas.GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(f'area: examples, at most {counts.max():,} of one class on a client', fontsize=9, color=_canvas.INK)


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
    _canvas.class_bar(figure, ScalarMappable(norm, colors), [axes], names)

"""What figures have in common: their colours, a row of axes, a legend for all, notes below."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by all readers, darkest first; line style and marker repeat the distinction. The
# numbers of colours, dashes and markers have no common divisor: of any 35 curves, no two share two of the three.
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
TEN = (*COLORS, '#882255', '#999933', '#7f7f7f')  # for classes
DASHES = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)))
MARKERS = 'osD^vPX*'
FILLS = ('full', 'none', 'left')  # of markers: where colours come again, and once more
HATCHES = ('', '//', '..', 'xx')  # of bars
INK, GRID, PAPER = '#404040', '#e4e4e4', '#ffffff'


def ranks(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The names of all panels in order: one looks the same wherever it is drawn."""
    return {name: i for i, name in enumerate(dict.fromkeys(name for panel in panels.values() for name in panel))}


def note_seeds(figure: 'Figure', middle: str, around: str, seeds: Iterable[int]) -> None:
    """Says what is drawn of several seeds, if anything is."""
    numbers = sorted(seeds)
    if numbers:
        many = str(numbers[0]) if len(numbers) == 1 else f'{numbers[0]} to {numbers[-1]}'
        note(figure, f'{middle}: means over {many} seeds; {around}: one standard deviation to either side.')


def note(figure: 'Figure', text: str) -> None:
    """A line below the axes, in as many lines as it needs."""
    size = 8
    lines = textwrap.wrap(text, int(figure.get_figwidth() * 72 / (0.52 * size)))
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.13 * len(lines))
    figure.supxlabel('\n'.join(lines), fontsize=size, color=INK)


def axes_in_a_row(width: float, height: float, columns: int = 1) -> tuple['Figure', list['Axes']]:
    """A row of axes, each of the given inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "fedjax_nc[examples]"') from error
    if columns < 1:
        raise ValueError('`panels` is empty: give at least one title.')
    figure = Figure(figsize=(width * columns, height), dpi=150, layout='constrained', facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    row = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in row:
        axes.spines[['top', 'right']].set_visible(False)
        axes.spines[['left', 'bottom']].set_color(INK)
        axes.tick_params(colors=INK)
        axes.set_facecolor(PAPER)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(INK)
    return figure, row


def entries(row: Sequence['Axes']) -> tuple[list[Any], list[str]]:
    """What legends of several axes tell, each name once."""
    found = {label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(found.values()), list(found)


def label(name: Any) -> str:
    """A name as matplotlib shows it in a legend, which leaves out those that begin with a line."""
    return f' {name}' if str(name).startswith('_') else str(name)


def legend(figure: 'Figure', row: Sequence['Axes'], most: int, length: float = 3) -> None:
    """One legend for several axes: in the first of them, or beside them where more entries would hide too much."""
    handles, labels = entries(row)
    if len(labels) <= most:
        row[0].legend(
            handles, labels, loc='best', framealpha=0.9, facecolor=PAPER, edgecolor='none', labelcolor=INK,
            handlelength=length,
        )  # fmt: skip
        return
    columns, size = 1 + len(labels) // 20, 10 if len(labels) < 13 else 8
    wide = columns * (0.35 + (length + 0.58 * max(map(len, labels), default=0)) * size / 72)  # about so many inches
    figure.set_figwidth(figure.get_figwidth() + wide)
    figure.legend(
        handles, labels, loc='outside right upper', frameon=False, labelcolor=INK, fontsize=size, ncols=columns,
        handlelength=length,
    )  # fmt: skip


def class_bar(figure: Any, drawn: Any, row: Sequence['Axes'], names: list[str]) -> None:
    """The colours of classes beside a row of axes, with their names."""
    bar = figure.colorbar(drawn, ax=row, pad=0.02)
    bar.set_label('class', color=INK)
    bar.ax.set_facecolor(PAPER)
    ticks(bar.set_ticks, names)
    bar.minorticks_off()
    bar.ax.tick_params(length=0, colors=INK)
    bar.outline.set_visible(False)


def ticks(set_ticks: Any, names: list[str]) -> None:
    step = next((n for n in (1, 2, 5, 10, 20, 50, 100) if len(names) <= 12 * n), 200)
    shown = range(0, len(names), step)
    set_ticks(list(shown), labels=[names[c] for c in shown])

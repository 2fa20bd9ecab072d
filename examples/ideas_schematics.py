"""What the pictures of docs/ideas.md have in common, and schematics: what a system changes in a round of FedAvg."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, RED, GREEN, PINK, ORANGE, SKY = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'
OF_CLASS = (BLUE, RED, GREEN)
INK, FAINT = '#404040', '#9a9a9a'


def figure_of(width: float, height: float, *columns: float) -> tuple[Figure, list[Axes]]:
    """A row of axes of these relative widths."""
    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    for axes in (row := list(figure.subplots(1, len(columns), width_ratios=columns, squeeze=False)[0])):
        axes.spines[['top', 'right']].set_visible(False)
        axes.spines[['left', 'bottom']].set_color(INK)
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_axisbelow(True)
    return figure, row


def arrow(axes: Axes, start: Sequence[float], end: Sequence[float], color: str, **style: Any) -> None:
    look = {'arrowstyle': '-|>', 'mutation_scale': 10, 'linewidth': 1.5, 'shrinkA': 0, 'shrinkB': 0} | style
    axes.add_patch(FancyArrowPatch(start, end, color=color, **look))


def named(axes: Axes, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Labels of the axes and a title, as far as they are given."""
    if x is not None:
        axes.set_xlabel(x, fontsize=9, color=INK)
    if y is not None:
        axes.set_ylabel(y, fontsize=9, color=INK)
    if title is not None:
        axes.set_title(title, fontsize=10, color=INK)


class Part(NamedTuple):
    """A box of a schematic: what it is, what happens to it, and where it stands."""

    label: str
    kind: str  # of KINDS
    x: float
    y: float
    width: float
    height: float = 4.6


KINDS = {
    'trained': (BLUE, 'trained, averaged'),
    'frozen': (FAINT, 'frozen'),
    'kept': (GREEN, 'never sent'),
    'moved': (RED, 'changed by the server'),
    'plain': (INK, ''),
}


class Schematic(NamedTuple):
    """One round: the server above, a client below, what travels between them, and when it happens."""

    parts: tuple[Part, ...]
    links: tuple[tuple[float, float, float, float], ...]  # arrows (from x, y, to x, y)
    notes: tuple[tuple[float, float, str], ...]  # words at x, y
    down: str
    up: str
    before: str
    during: str
    after: str
    acts: tuple[bool, bool, bool]  # where in this pipeline the system differs from FedAvg
    who: str = 'each client of the round'
    detached: tuple[tuple[float, float, float, float], ...] = ()  # arrows that no gradient passes


WIDTH, CLIENT, SERVER = 56.0, (5.6, 18.4), (25.6, 34.0)


def draw_schematic(axes: Axes, drawn: Schematic) -> None:
    axes.set(xlim=(0, WIDTH), ylim=(-0.3, 34.6))
    axes.axis('off')
    for (low, high), name in ((CLIENT, drawn.who), (SERVER, 'server')):
        box(axes, 0.4, low, WIDTH - 0.8, high - low, INK, 0.0, 0.9)
        axes.text(1.4, high - 0.7, name, fontsize=9, color=INK, va='top', weight='bold')
    for part in drawn.parts:
        color, words = KINDS[part.kind]
        if part.kind != 'plain':
            box(axes, part.x, part.y, part.width, part.height, color, 0.22, 1.4)
        middle = part.x + part.width / 2
        axes.text(middle, part.y + part.height / 2, part.label, fontsize=8.5, color='#000000', ha='center', va='center')
        axes.text(middle, part.y - 0.4, words, fontsize=7.5, color=INK, ha='center', va='top', style='italic')
    for x0, y0, x1, y1 in drawn.links:
        arrow(axes, (x0, y0), (x1, y1), INK, linewidth=1.1, mutation_scale=8)
    for x0, y0, x1, y1 in drawn.detached:
        bow = {'connectionstyle': 'arc3,rad=-0.11', 'linestyle': (0, (3, 2))}
        arrow(axes, (x0, y0), (x1, y1), INK, linewidth=1.1, mutation_scale=8, **bow)
    for x, y, words in drawn.notes:
        axes.text(x, y, words, fontsize=8, color=INK, ha='center', va='center')
    for x, words, (start, end) in ((4, drawn.down, (25.4, 18.6)), (31, drawn.up, (18.6, 25.4))):
        arrow(axes, (x, start), (x, end), INK, linewidth=2.2, mutation_scale=14)
        axes.text(x + 1.4, 22, words, fontsize=8.5, color='#000000', va='center')
    third = (WIDTH - 0.8) / 3
    for i, (title, words) in enumerate(
        (('before training', drawn.before), ('in every round', drawn.during), ('after training', drawn.after))
    ):
        color, tint = (ORANGE, 0.25) if drawn.acts[i] else (FAINT, 0.0)
        box(axes, 0.6 + i * third, 0, third - 0.4, 4.4, color, tint, 1)
        axes.text(0.4 + (i + 0.5) * third, 3.9, title, fontsize=7.5, color=INK, ha='center', va='top', style='italic')
        axes.text(0.4 + (i + 0.5) * third, 1.5, words, fontsize=8.5, color='#000000', ha='center', va='center')


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, tint: float, line: float) -> None:
    shape = 'round,pad=0,rounding_size=0.7'
    if tint:
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=color, alpha=tint, linewidth=0))
    outline = {'edgecolor': color, 'facecolor': 'none', 'linewidth': line}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **outline))


ROW = 9.2  # where boxes of the client stand
IMAGES, BODY = Part('images', 'plain', 0.8, ROW, 7), Part('body', 'trained', 9.5, ROW, 9)
AVERAGES = 'averages, as in FedAvg'


def along(*ends: float, y: float = 11.5) -> tuple[tuple[float, float, float, float], ...]:
    """Arrows from left to right, of which each second number is an end; by default in the row of the client."""
    return tuple((start, y, end, y) for start, end in zip(ends[::2], ends[1::2], strict=True))


SCHEMATICS = {
    'fedetf': Schematic(
        parts=(
            IMAGES,
            BODY,
            Part('projection,\ntemperature', 'trained', 21.5, ROW, 11),
            Part('simplex ETF', 'frozen', 35.5, ROW, 10),
            Part('balanced\nloss', 'plain', 47, ROW, 8),
        ),
        links=along(7.2, 9.5, 18.5, 21.5, 32.5, 35.5, 45.5, 47.6),
        notes=((28, 29, AVERAGES),),
        down='body, projection,\ntemperature',
        up='their changes',
        before='the frame is drawn',
        during='features learn it',
        after='personal models',
        acts=(True, True, True),
    ),
    'gmv': Schematic(
        parts=(
            IMAGES,
            BODY,
            Part('simplex ETF', 'frozen', 35.5, ROW, 10),
            Part('loss', 'plain', 47, ROW, 8),
            Part('memory: a mean\nfeature of each class', 'moved', 36, 28.4, 18),
        ),
        links=along(7.2, 9.5, 18.5, 35.5, 45.5, 48.8),
        notes=((27, 13.2, 'features + $\\alpha$ memory\nof their class'), (18, 29.5, AVERAGES)),
        down='body, memory',
        up='its change,\nclass means of features',
        before='the frame is drawn',
        during='late: the memory acts',
        after='as it is',
        acts=(True, True, False),
    ),
    'fedloge': Schematic(
        parts=(
            IMAGES,
            Part('body', 'trained', 9.5, ROW, 8),
            Part('sparse ETF', 'frozen', 23, ROW, 9.5),
            Part('global\nhead', 'trained', 34.5, ROW, 8.5),
            Part('private\nhead', 'kept', 45, ROW, 9.5),
        ),
        links=along(7.2, 9.5, 17.5, 23),
        notes=((47.5, 17.1, 'dashed: no gradient'), (28, 29, AVERAGES)),
        detached=((16, 13.8, 38.7, 13.8), (14.5, 13.8, 49.7, 13.8)),
        down='body, global head',
        up='their changes',
        before='the frame is made',
        during='two heads beside it',
        after='lengths realigned',
        acts=(True, True, True),
    ),
    'ccvr': Schematic(
        parts=(
            IMAGES,
            Part('body', 'frozen', 9.5, ROW, 9),
            Part('mean and covariance of\nthe features of each class', 'plain', 25, ROW, 26),
            Part('one Gaussian\nfor each class', 'plain', 10, 27.6, 11),
            Part('virtual\nfeatures', 'plain', 25, 27.6, 9),
            Part('classifier', 'moved', 39, 28.2, 12, 4.2),
        ),
        links=along(7.2, 9.5, 18.5, 27.5) + along(21.5, 25.4, 34, 39, y=29.9),
        notes=(),
        down='body',
        up='class means, covariances,\ncounts: once',
        before='as it is',
        during='any method',
        after='classifier refitted',
        acts=(False, False, True),
        who='every client, once',
    ),
    'fednh': Schematic(
        parts=(
            IMAGES,
            BODY,
            Part('unit\nlength', 'plain', 21, ROW, 7),
            Part('prototypes', 'frozen', 31.5, ROW, 10),
            Part('scaled\ncosines, loss', 'plain', 44, ROW, 11),
            Part('prototypes: a step to\nthe mean of the class', 'moved', 36, 28.4, 18),
        ),
        links=along(7.2, 9.5, 18.5, 21.7, 27.2, 31.5, 41.5, 44),
        notes=((18, 29.5, AVERAGES),),
        down='body, scale,\nprototypes',
        up='changes of body and scale,\nclass means of features',
        before='spread evenly',
        during='prototypes follow',
        after='as it is',
        acts=(True, True, False),
    ),
}


def system(name: str) -> tuple[Figure, Axes]:
    """A figure with the schematic of a system, and axes for what was computed beside it."""
    figure, (left, right) = figure_of(8.0, 3.5, 1.95, 1)
    draw_schematic(left, SCHEMATICS[name])
    named(right, title='computed')
    return figure, right

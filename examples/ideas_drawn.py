"""The pictures of docs/ideas.md, drawn of what was computed."""

import itertools
from typing import Any

import ideas_measured as measured
import numpy as np
from ideas_schematics import BLUE, FAINT, GREEN, INK, OF_CLASS, ORANGE, PINK, RED, SKY, arrow, figure_of, named, system
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from fedjax_nc import data, frames, plots


def plane(axes: Axes, reach: float, title: str) -> None:
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect='equal')
    named(axes, title=title)
    axes.axhline(0, color='#e4e4e4', linewidth=0.8, zorder=0)
    axes.axvline(0, color='#e4e4e4', linewidth=0.8, zorder=0)


def draw_drift(found: measured.Drift) -> Figure:
    figure, row = figure_of(7.6, 4.5, 1, 1)
    reach = 1.12 * max(np.abs(found.even).max(), np.abs(found.uneven).max())
    panels = (
        ('digits dealt evenly', found.even, np.ones_like(found.held)),
        (f'Dirichlet({measured.ALPHA})', found.uneven, found.held),
    )
    for axes, (title, vectors, held), cosines in zip(row, panels, found.cosines.values(), strict=True):
        plane(axes, reach, f'{title}: mean cosine {cosines[0]:.2f}')
        for (k, c), own in np.ndenumerate(held):
            style = {} if own else {'linestyle': (0, (3, 2)), 'linewidth': 1.1}
            arrow(axes, (0, 0), vectors[k, c], OF_CLASS[c], alpha=0.85 if own else 0.6, **style)
        for received, color in zip(found.received, OF_CLASS, strict=True):
            axes.plot(*received, 'o', color=color, markersize=9, markeredgecolor='#000000', markeredgewidth=2, zorder=5)
        named(axes, 'first feature')
    named(row[0], y='second feature')
    for digit, color in zip(measured.TRIO, OF_CLASS, strict=True):
        row[0].plot([], [], color=color, linewidth=2, label=f'digit {digit}')
    row[0].plot([], [], color=INK, linewidth=1.1, linestyle=(0, (3, 2)), label='client holds none of it')
    received = {'color': '#ffffff', 'markeredgecolor': '#000000', 'markersize': 9, 'markeredgewidth': 2}
    row[0].plot([], [], 'o', label='tip as received', **received)
    figure.legend(loc='outside lower center', ncols=5, frameon=False, fontsize=9)
    return figure


def draw_agreement(found: measured.Agreement) -> Figure:
    figure, row = figure_of(8.0, 2.8, 1, 1, 1.3)
    for axes, (title, cosines) in zip(row, found.cosines.items(), strict=False):
        image = axes.imshow(cosines, vmin=0, vmax=1, cmap='viridis', interpolation='nearest')
        named(axes, 'client', title=title)
        axes.set(xticks=range(0, len(cosines), 5), yticks=range(0, len(cosines), 5))
        axes.spines[:].set_visible(False)
    named(row[0], y='client')
    bar_of(figure, row[:2], image, 'cosine of classifiers')
    for (name, values), color, mark in zip(found.layers.items(), (BLUE, RED), 'os', strict=True):
        row[2].plot(range(len(measured.LAYERS)), values, f'{mark}-', color=color, label=name)
    row[2].set(ylim=(0, 1.03), xlim=(-0.3, len(measured.LAYERS) - 0.7))
    row[2].set_xticks(
        range(len(measured.LAYERS)), labels=[name.replace(' ', '\n') for name in measured.LAYERS.values()]
    )
    named(row[2], y='CKA, mean over pairs', title='layer by layer')
    row[2].grid(axis='y', color='#e4e4e4', linewidth=0.8)
    row[2].legend(frameon=False, fontsize=9, loc='lower left')
    return figure


def draw_frames() -> Figure:
    """A simplex of three vectors in the plane, of four in space, and the cosines of ten."""
    figure, (flat, space, many) = figure_of(8.0, 2.9, 1, 1, 1.3)
    three = turned(np.asarray(frames.simplex_etf(measured.KEY, 2, 3)).T)
    flat.add_patch(Circle((0, 0), 1, fill=False, edgecolor=FAINT, linewidth=1, linestyle=':'))
    four = turned(np.asarray(frames.simplex_etf(measured.KEY, 3, 4)).T)
    for axes, vectors, title in (
        (flat, three, '3 classes in 2 dimensions'),
        (space, four, '4 classes in 3 dimensions'),
    ):
        spots = seen_from_above(vectors)
        for a, b in itertools.combinations(spots, 2):
            axes.plot(*np.stack([a, b]).T, color=FAINT, linewidth=1, zorder=0)
        for spot, color in zip(spots, (*OF_CLASS, ORANGE), strict=False):
            arrow(axes, (0, 0), spot, color, linewidth=2.6, mutation_scale=15)
        axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect='equal')
        axes.axis('off')
        named(axes, title=title)
    bend = np.radians(np.linspace(90, 210, 40))
    flat.plot(0.3 * np.cos(bend), 0.3 * np.sin(bend), color=INK, linewidth=1)
    flat.text(-0.68, 0.4, '120°', fontsize=10, color=INK, ha='center', va='center')
    space.text(0, -1.05, 'any two at 109.5°', fontsize=10, color=INK, ha='center', va='center')
    ten = np.asarray(frames.simplex_etf(measured.KEY, 9, 10))
    image = many.imshow(ten.T @ ten, vmin=-1, vmax=1, cmap='viridis', interpolation='nearest')
    named(many, 'class', 'class', '10 classes in 9 dimensions')
    many.set(xticks=range(0, 10, 3), yticks=range(0, 10, 3))
    many.spines[:].set_visible(False)
    bar_of(figure, many, image, 'cosine of class vectors', {-1: '-1', -1 / 9: '-1/9', 1: '1'})
    return figure


def bar_of(
    figure: Figure, axes: Axes | list[Axes], image: Any, label: str, ticks: dict[float, str] | None = None
) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.03)
    if ticks:
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=9, colors=INK)
    bar.outline.set_visible(False)


def turned(vectors: np.ndarray) -> np.ndarray:
    """A frame [C, d], turned so that its first vector points upwards, along the last axis."""
    d = vectors.shape[1]
    up = np.concatenate([vectors[:1], np.eye(d)[: d - 1]])
    q, r = np.linalg.qr(up.T)
    q *= np.sign(np.diag(r))
    return np.roll(vectors @ q, -1, axis=1)


def seen_from_above(vectors: np.ndarray) -> np.ndarray:
    """Where points of space [n, 3] lie in a picture, the last axis upwards; points of the plane stay."""
    if vectors.shape[1] == 2:
        return vectors
    around = np.radians(-75) - np.arctan2(vectors[1, 1], vectors[1, 0])  # the second point comes to the front
    turn, tilt = np.array([[np.cos(around), -np.sin(around)], [np.sin(around), np.cos(around)]]), np.radians(20)
    x, y = turn @ vectors[:, :2].T
    return np.stack([x, np.cos(tilt) * vectors[:, 2] + np.sin(tilt) * y], axis=1)


def draw_collapse(found: measured.Collapse) -> Figure:
    figure, row = figure_of(8.6, 2.9, *[1] * len(found.seen), 1.25)
    for axes, (t, (z, w)) in zip(row, found.seen.items(), strict=False):
        reach = 1.1 * np.abs(z).max()
        plane(axes, reach, f'after {t} {"pass" if t == 1 else "passes"}')
        tips = 0.8 * reach * w / np.linalg.norm(w, axis=1).max()
        for c, color in enumerate(OF_CLASS):
            axes.scatter(*z[found.y == c].T, s=7, color=color, alpha=0.55, linewidths=0)
            arrow(axes, (0, 0), tips[c], '#000000', linewidth=1.8, arrowstyle='-', zorder=4)
            axes.plot(
                *tips[c], 'o', color=color, markersize=7, markeredgecolor='#000000', markeredgewidth=1.5, zorder=5
            )
        named(axes, 'first feature')
    named(row[0], y='second feature')
    for digit, color in zip(measured.TRIO, OF_CLASS, strict=True):
        row[0].plot([], [], 'o', color=color, markersize=6, label=f'digit {digit}')
    tip = {'color': '#ffffff', 'markeredgecolor': '#000000', 'markersize': 7, 'markeredgewidth': 1.5}
    row[0].plot([], [], 'o', label='class vector', **tip)
    figure.legend(*row[0].get_legend_handles_labels(), loc='outside lower left', ncols=4, frameon=False, fontsize=9)
    curves = row[-1]
    for (name, values), color, dash in zip(found.curves.items(), (BLUE, RED, GREEN), ('-', '--', '-.'), strict=True):
        curves.plot(range(1, len(values) + 1), values, color=color, linestyle=dash, label=name)
    curves.set(xscale='log', yscale='log')
    named(curves, 'pass over the data', title='0 is collapse')
    curves.grid(color='#e4e4e4', linewidth=0.8)
    curves.set_ylim(top=20)
    curves.legend(frameon=False, fontsize=8, loc='upper right', borderaxespad=0)
    return figure


def draw_etf(found: measured.Simplex) -> Figure:
    figure, axes = system('fedetf')
    rng = np.random.default_rng(0)
    for i, ((name, cosines), color, mark) in enumerate(zip(found.cosines.items(), (RED, BLUE), 'so', strict=True)):
        axes.plot(i + rng.uniform(-0.22, 0.22, len(cosines)), cosines, mark, color=color, alpha=0.6, markersize=4.5)
        axes.text(i, 0.96, f'{100 * found.accuracy[name]:.0f} % right', fontsize=9, color=INK, ha='center', va='top')
    axes.axhline(-1 / 9, color='#000000', linewidth=1.2, linestyle='--')
    axes.text(0.5, -1 / 9 - 0.04, 'simplex', fontsize=8.5, color=INK, ha='center', va='top')
    axes.set(xlim=(-0.55, 1.5), ylim=(-0.8, 1))
    axes.set_xticks([0, 1], labels=list(found.cosines))
    named(axes, y='cosine of two class means', title='45 pairs of digits, test images')
    return figure


def draw_memory(found: measured.Remembered) -> Figure:
    figure, axes = system('gmv')
    moved = found.z + found.alpha * found.memory[found.y]
    reach = 1.1 * max(np.abs(moved).max(), np.abs(found.memory).max())
    plane(axes, reach, 'features of one client')
    for c, color in enumerate(OF_CLASS):
        some = np.flatnonzero(found.y == c)
        axes.scatter(*found.z[some].T, s=9, color=color, alpha=0.5, linewidths=0, label=f'digit {measured.TRIO[c]}')
        for i in some[:12]:
            arrow(axes, found.z[i], moved[i], color, linewidth=0.9, mutation_scale=7, alpha=0.9)
        axes.plot(*found.memory[c], '*', color=color, markersize=15, markeredgecolor='#000000', markeredgewidth=0.9)
    axes.plot([], [], '*', color='#ffffff', markeredgecolor='#000000', markersize=11, label='memory')
    named(axes, 'first feature', 'second feature')
    axes.legend(frameon=False, fontsize=8, loc='lower left', handletextpad=0.2, borderaxespad=0)
    return figure


def draw_lengths(found: measured.Lengths) -> Figure:
    figure, axes = system('fedloge')
    classes = np.arange(len(found.examples))
    axes.bar(classes, found.lengths / found.lengths.max(), 0.8, color=SKY, alpha=0.6, label='length of class vector')
    axes.plot(classes, found.before, 's--', color=RED, markersize=4.5, label='accuracy before')
    axes.plot(classes, found.after, 'o-', color=BLUE, markersize=4.5, label='accuracy after')
    axes.set_xticks(classes, labels=[str(n) for n in found.examples], fontsize=7)
    axes.set_ylim(0, 1.42)
    axes.set_yticks([0, 0.5, 1])
    named(axes, 'training examples of the class', 'accuracy; length, longest = 1', 'all lengths made equal')
    axes.legend(frameon=False, fontsize=8, loc='upper right', borderaxespad=0)
    return figure


def draw_calibration(found: measured.Calibrated) -> Figure:
    figure, axes = system('ccvr')
    low, high = found.z.min(0), found.z.max(0)
    low, high = low - 0.06 * (high - low), high + 0.12 * (high - low)
    for c, color in enumerate((BLUE, RED, GREEN, PINK, ORANGE)):
        own = found.z[found.y == c]
        axes.scatter(*own.T, s=11, color=color, marker='os^Dv'[c], alpha=0.75, linewidths=0)
        axes.text(
            *own.mean(0), str(measured.FIVE[c]), fontsize=13, weight='bold', color='#000000', ha='center', va='center'
        )
    for head, color, style, words in ((found.before, FAINT, '--', 'before'), (found.after, '#000000', '-', 'after')):
        for line in borders(head, 2 * float(np.abs([low, high]).max())):
            axes.plot(*line.T, color=color, linewidth=1.3, linestyle=style)
        axes.plot([], [], color=color, linewidth=1.3, linestyle=style, label=words)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    right = ' to '.join(f'{100 * share:.0f}' for share in found.accuracy)
    named(axes, 'first feature', 'second feature', f'test images, {right} % right')
    axes.legend(frameon=False, fontsize=8.5, loc='upper right', borderaxespad=0)
    return figure


def borders(head: dict[str, np.ndarray], reach: float) -> list[np.ndarray]:
    """Where a linear classifier in the plane decides between two classes: points [n, 2] of each pair, NaN elsewhere."""
    lines = []
    for a, b in itertools.combinations(range(len(head['b'])), 2):
        normal, offset = head['w'][:, a] - head['w'][:, b], head['b'][a] - head['b'][b]
        along = np.array([-normal[1], normal[0]]) / np.linalg.norm(normal)
        points = -offset * normal / (normal @ normal) + np.linspace(-reach, reach, 2000)[:, None] * along
        logits = points @ head['w'] + head['b']
        lines.append(np.where((logits[:, a] >= logits.max(1) - 1e-6)[:, None], points, np.nan))
    return lines


def draw_meaning(found: measured.Meaning) -> Figure:
    figure, axes = system('fednh')
    axes.plot(found.images, found.first, 's', color=RED, markersize=3.5, label='first prototypes')
    axes.plot(found.images, found.last, 'o', color=BLUE, markersize=4.5, alpha=0.75, label='after training')
    for i in (np.argmin(found.images), np.argmax(found.images)):
        spot, words = (found.images[i], found.last[i]), '{} and {}'.format(*found.pairs[i])
        axes.annotate(words, spot, (0, -8), textcoords='offset points', fontsize=8.5, color=INK, ha='center', va='top')
    axes.margins(x=0.13)
    named(axes, 'cosine of mean images, centred', 'cosine of prototypes', '45 pairs of digits')
    axes.set_ylim(-0.2, 1.45 * found.last.max())
    axes.legend(frameon=False, fontsize=8, loc='upper left', handletextpad=0.2, borderaxespad=0)
    return figure


def draw_clients() -> Figure:
    """The first picture of docs/getting-started.md."""
    ten = measured.digits()
    return plots.class_distribution(data.federate(ten.x, ten.y, data.dirichlet(ten.y, 20, measured.ALPHA, seed=0)))

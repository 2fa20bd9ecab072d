"""The figures of a study."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_nc import evaluate, plots
from fedjax_nc.experiments.study import Study

Found = Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]
"""(method, scene) -> seed -> summary of a finished run."""

Panels = dict[str, dict[str, Any]]
"""title -> name -> what is drawn."""


def of(study: Study, found: Found) -> Iterator[tuple[str, Any]]:
    """All that can be drawn of the runs there are: name -> figure."""
    curves: Panels = {}
    sent: Panels = {}
    spread: Panels = {}
    bars: Panels = {}
    names: tuple[str, ...] = ()
    for scene in study.scenes:
        title = scene or study.name
        for method in study.methods:
            runs = [s for s in found.get((method, scene), {}).values() if s.get('curve')]
            if not runs:
                continue
            rounds = sorted(set.intersection(*({r for r, _ in s['curve']} for s in runs)))
            lines = [[dict(s['curve'])[r] for r in rounds] for s in runs]
            if rounds:
                curves.setdefault(title, {})[method] = (rounds, lines)
                each = [(s['bytes']['down'] + s['bytes']['up']) / s['rounds'] for s in runs if 'bytes' in s]
                if each:
                    sent.setdefault(title, {})[method] = (np.array(rounds) * np.mean(each), lines)
            own = [a for s in runs for a in s.get('clients', {}).get('personal_accuracy', ()) if a is not None]
            if own:
                spread.setdefault(title, {})[method] = 100 * np.array(own)
            grouped = [by_group(s) for s in runs if 'class_accuracy' in s]
            if grouped:
                names = grouped[0][0]
                bars.setdefault(title, {})[method] = [numbers for _, numbers in grouped]
    if curves:
        yield 'curves', labelled(plots.curve_panels(curves), 'test accuracy [%]')
    if sent:
        most = max(float(np.max(x)) for panel in sent.values() for x, _ in panel.values())
        unit, factor = ('GB', 1e9) if most >= 1e10 else ('MB', 1e6) if most >= 1e7 else ('kB', 1e3)
        panels = {t: {m: (x / factor, y) for m, (x, y) in panel.items()} for t, panel in sent.items()}
        figure = plots.curve_panels(panels, xlabel=f'sent by and to all clients [{unit}]')
        yield 'communication', labelled(figure, 'test accuracy [%]')
    if spread:
        yield 'clients', plots.boxes(spread, ylabel="clients' accuracy [%]")
    if bars and all(len(np.shape(v)) == 2 for panel in bars.values() for v in panel.values()):
        yield 'groups', plots.grouped_bars(bars, names)


def by_group(summary: Mapping[str, Any]) -> tuple[tuple[str, ...], list[float]]:
    """Accuracy in percent of the generic model by groups of classes: many, medium and few examples; each class where
    all have about as many; the best, middle and worst third where those would be more than ten."""
    accuracy, examples = 100 * np.array(summary['class_accuracy']), np.array(summary['class_examples'])
    if examples.max() > 2 * max(examples.min(), 1):
        group = np.asarray(evaluate.groups(jnp.asarray(examples)))
        means = [float(accuracy[group == g].mean()) if (group == g).any() else math.nan for g in range(3)]
        return ('many', 'medium', 'few'), means
    if len(accuracy) <= 10:
        return tuple(map(str, range(len(accuracy)))), accuracy.tolist()
    return ('best third', 'middle', 'worst third'), [
        float(p.mean()) for p in np.array_split(np.sort(accuracy)[::-1], 3)
    ]


def labelled(figure: Any, ylabel: str) -> Any:
    """The figure with a label on its first vertical axis."""
    figure.axes[0].set_ylabel(ylabel)
    return figure

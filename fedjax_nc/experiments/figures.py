"""The figures of a study."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_nc import evaluate, plots
from fedjax_nc.experiments import costs
from fedjax_nc.experiments.costs import Found, sound
from fedjax_nc.experiments.runner import percent
from fedjax_nc.experiments.study import Study

Panels = dict[str, dict[str, Any]]
"""title -> name -> what is drawn."""
CALLED = {
    'nc1': 'NC1, scatter within / between', 'nc2': 'NC2, gap to simplex angles',
    'nc3': 'NC3, cosine to class vector', 'test_loss': 'test loss', 'top5_accuracy': 'top-5 accuracy [%]',
    'macro_f1': 'macro F1 score',
}  # fmt: skip
"""What probes' numbers are called beside an axis."""


def of(study: Study, found: Found, target: float | None = None) -> Iterator[tuple[str, Any]]:
    """All that can be drawn of the runs there are, but for those that diverged: name -> figure.

    Rounds are counted to a target in percent, by default where the baseline ends.

    What rounds, clients and classes say is of the model that a run ends with: rows that look at another are left out.
    """
    curves: Panels = {}
    personal: Panels = {}
    sent: Panels = {}
    spread: Panels = {}
    probed: dict[str, Panels] = {}  # by what was measured
    bars: dict[tuple[str, ...], Panels] = {}  # by the names of the groups
    for scene in study.scenes:
        title = textwrap.fill(scene or study.name, 34)  # the width of one panel
        drawn = {method: sound(found.get((method, scene), {})) for method in study.methods}
        names, group = grouping([s for runs in drawn.values() for s in runs if 'class_accuracy' in s])
        for method, runs in drawn.items():
            if not runs or study.apart(method):
                continue
            rounds = sorted(set.intersection(*({r for r, _ in s['curve']} for s in runs)))
            lines = [[dict(s['curve'])[r] for r in rounds] for s in runs]
            if len(rounds) > 1:  # one is no curve
                alone = any(s.get('personal') for s in runs)
                (personal if alone else curves).setdefault(title, {})[method] = (rounds, lines)
                each = [(s['bytes']['down'] + s['bytes']['up']) / s['rounds'] for s in runs if 'bytes' in s]
                if each and not alone:
                    sent.setdefault(title, {})[method] = (np.array(rounds) * np.mean(each), lines)
                for name in sorted(set.intersection(*(set(s.get('probed', ())) for s in runs))):
                    values = [[dict(s['probed'][name]).get(r, math.nan) for r in rounds] for s in runs]
                    drawable = np.where(np.isfinite(values), values, math.nan) * (100 if percent(name) else 1)
                    probed.setdefault(name, {}).setdefault(title, {})[method] = (rounds, drawable)
            own = [a for s in runs for a in of_clients(s) if a is not None]
            if own and not study.apart(method, 'personal_accuracy_'):
                spread.setdefault(title, {})[method] = 100 * np.array(own)
            if grouped := [group(s) for s in runs if 'class_accuracy' in s]:
                bars.setdefault(names, {}).setdefault(title, {})[method] = grouped
    if curves:
        yield 'curves', labelled(plots.curve_panels(curves), 'test accuracy [%]')
    if personal:  # of methods without a generic model, which cannot be told beside it
        yield 'curves_personal', labelled(plots.curve_panels(personal), "mean of clients' accuracies [%]")
    if sent:
        most = max(float(np.max(x)) for panel in sent.values() for x, _ in panel.values())
        unit, factor = ('GB', 1e9) if most >= 1e10 else ('MB', 1e6) if most >= 1e7 else ('kB', 1e3)
        panels = {t: {m: (x / factor, y) for m, (x, y) in panel.items()} for t, panel in sent.items()}
        figure = plots.curve_panels(panels, xlabel=f'sent by and to all clients [{unit}]')
        yield 'communication', labelled(figure, 'test accuracy [%]')
    for name, panels in probed.items():
        yield f'probe_{name}', labelled(plots.curve_panels(panels), CALLED.get(name, name))
    if drawn_rounds := rounds_to(study, found, target):
        yield 'rounds', drawn_rounds
    if spread:
        yield 'clients', plots.boxes(spread, ylabel="clients' accuracy [%]")
    for i, (names, panels) in enumerate(bars.items()):
        figure = plots.grouped_bars(panels, names)
        for axes in figure.axes:
            axes.set_xlabel('class' if names[0] == '0' else 'classes')
        yield f'groups{i + 1 if i else ""}', figure


def rounds_to(study: Study, found: Found, target: float | None) -> Any:
    """Bars of the rounds to an accuracy, a panel for each scene; None where there is nothing to compare.

    A method has a bar where all of its runs reached it.
    """
    panels: Panels = {}
    for scene in study.scenes:
        told = [cost for cost in costs.of(study, found, scene, target) if cost.several.seeds]
        if len(told) > 1 and any(cost.rounds.seeds for cost in told):
            title = textwrap.fill(f'{scene}, to {told[0].goal:.1f} %' if scene else f'to {told[0].goal:.1f} %', 26)
            panels[title] = {c.method: [c.rounds.mean if c.rounds.seeds == c.runs else math.nan] for c in told}
    return plots.grouped_bars(panels, [''], ylabel='rounds (no bar: not reached)') if panels else None


def of_clients(summary: Mapping[str, Any]) -> Sequence[float | None]:
    """The accuracy of each client, on a common test set by the classes as the client has them."""
    told = summary.get('clients') or {}
    return told.get('personal_accuracy_labels', told.get('personal_accuracy', ()))


Group = Callable[[Mapping[str, Any]], list[float]]
"""summary -> accuracy in percent of the generic model for each group of classes."""


def grouping(summaries: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], Group]:
    """How the classes of one scene are grouped, for all of its runs alike.

    By many, medium and few training examples if some class has more than twice as many as another; each class by itself
    where there are at most ten; else the best, middle and worst third.
    """
    tables = [np.array(s['class_examples']) for s in summaries]
    if any(examples.max() > 2 * max(examples.min(), 1) for examples in tables):
        return ('many', 'medium', 'few'), by_examples
    if all(len(examples) <= 10 for examples in tables):
        count = max((len(examples) for examples in tables), default=0)
        return tuple(map(str, range(count))), lambda s: percents(s).tolist()
    return ('best third', 'middle', 'worst third'), by_thirds


def by_examples(summary: Mapping[str, Any]) -> list[float]:
    """Of classes with many, medium and few examples, by the test examples that they have."""
    accuracy, group = percents(summary), np.asarray(evaluate.groups(jnp.asarray(summary['class_examples'])))
    weight = np.array(summary.get('class_tested', np.isfinite(accuracy)), float)
    tested = [(group == g) & (weight > 0) for g in range(3)]
    return [float(np.average(accuracy[rows], weights=weight[rows])) if rows.any() else math.nan for rows in tested]


def by_thirds(summary: Mapping[str, Any]) -> list[float]:
    """Of the best, middle and worst third of the classes that are tested."""
    accuracy = percents(summary)
    thirds = np.array_split(np.sort(accuracy[np.isfinite(accuracy)])[::-1], 3)
    return [float(third.mean()) if len(third) else math.nan for third in thirds]


def percents(summary: Mapping[str, Any]) -> np.ndarray:
    """Accuracies of classes [C], NaN for those without test examples."""
    return 100 * np.array(summary['class_accuracy'], float)


def labelled(figure: Any, ylabel: str) -> Any:
    """The figure with a label on its first vertical axis."""
    figure.axes[0].set_ylabel(ylabel)
    return figure

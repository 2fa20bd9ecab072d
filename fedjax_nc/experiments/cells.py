"""What stands in the cells of a report's tables, as text."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedjax_nc.experiments import runner
from fedjax_nc.experiments.costs import Cost, Found, mean
from fedjax_nc.experiments.study import Study


class Difference(NamedTuple):
    """Of pairs of the same seed: their mean and the bounds of its 95 % interval, NaN for a single pair."""

    mean: float
    low: float
    high: float
    pairs: int


def values(study: Study, found: Found, method: str, scene: str, heading: str) -> dict[int, float]:
    """What one cell has under a heading: seed -> number."""
    name = study.metric(method, heading)
    if name.startswith(runner.TO) and study.apart(method):  # curves are of the model that a run ends with
        return {}
    numbers = {seed: runner.value(summary, name) for seed, summary in found.get((method, scene), {}).items()}
    return {seed: number for seed, number in numbers.items() if math.isfinite(number)}


def difference(numbers: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Of the seeds that both have."""
    row = np.array([numbers[seed] - baseline[seed] for seed in numbers if seed in baseline], float)
    if not row.size:
        return Difference(math.nan, math.nan, math.nan, 0)
    half = math.nan
    if row.size > 1:
        half = float(stats.t.ppf(0.975, row.size - 1) * row.std(ddof=1) / math.sqrt(row.size))
    return Difference(float(row.mean()), float(row.mean()) - half, float(row.mean()) + half, row.size)


def number(name: str, average: float, std: float, plus: str = '±') -> str:
    """A mean and its deviation as they are printed; nothing for NaN."""
    if math.isnan(average):
        return ''
    return runner.shown(name, average) + (f' {plus} {runner.shown(name, std)}' if math.isfinite(std) else '')


def row(study: Study, found: Found, method: str, scene: str, plus: str = '±') -> Iterator[tuple[str, str]]:
    """What a row says in one scene: for every metric what was found and what was published."""
    printed = study.published.get((method, scene), ((math.nan, math.nan),) * len(study.metrics))
    for heading, theirs in zip(study.metrics, printed, strict=True):
        name, numbers = study.metric(method, heading), values(study, found, method, scene, heading)
        ours, runs = number(name, *mean(numbers.values())[:2], plus), found.get((method, scene), {})
        if not ours and any('diverged' in summary for summary in runs.values()):
            ours = 'diverged'
        elif not ours and _counted(study, method, runs) and name.startswith(runner.TO):
            ours = 'not reached'
        elif ours and len(numbers) < (seeds := _seeds(found, scene)):
            lost = sum('diverged' in summary for summary in runs.values())
            ours += f' ({len(numbers)} of {seeds}{f", {lost} diverged" if lost else ""})'
        yield ours, number(name, *theirs, plus)


def best(study: Study, found: Found, scene: str) -> list[set[str]]:
    """For every metric the methods with the highest mean as it is printed; nobody where one alone has a number.

    Only of accuracies, of which more is better.
    """
    columns = []
    for heading in study.metrics:
        names = {method: study.metric(method, heading) for method in study.methods}
        means = {method: mean(values(study, found, method, scene, heading).values()).mean for method in names}
        told = {
            method: float(runner.shown(names[method], value))
            for method, value in means.items()
            if runner.percent(names[method]) and not names[method].endswith('_std') and math.isfinite(value)
        }
        highest = {method for method, value in told.items() if value == max(told.values())}
        columns.append(highest if len(told) > 1 else set[str]())
    return columns


def _counted(study: Study, method: str, runs: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether a row has runs whose rounds to an accuracy can be counted."""
    return not study.apart(method) and any(not summary.get('personal') for summary in runs.values())


def _seeds(found: Found, scene: str) -> int:
    """How many have finished with any method in a scene."""
    return len({seed for (_, other), runs in found.items() if other == scene for seed in runs})


def gained(study: Study, found: Found, method: str, scene: str) -> list[str]:
    """What a row has more than the baseline, seed by seed, under each heading; nothing where there is no pair."""
    row = []
    for heading in study.metrics:
        base = values(study, found, study.baseline, scene, heading)
        gain = difference(values(study, found, method, scene, heading), base)
        name = study.metric(method, heading)
        text = '' if math.isnan(gain.mean) else f'{"+" * (gain.mean >= 0)}{runner.shown(name, gain.mean)}'
        if math.isfinite(gain.low):
            text += f' [{runner.shown(name, gain.low)}, {runner.shown(name, gain.high)}]'
        if 0 < gain.pairs < max(map(len, found.values())):
            text += f' ({gain.pairs} pair{"s" * (gain.pairs > 1)})'
        row.append(text)
    return row


def cost_row(cost: Cost) -> list[str]:
    """What a row says of its cost, but for its name; no rounds where there is no accuracy to count them to."""
    rounds = [] if math.isnan(cost.goal) else [reached(cost)]
    return [
        number('accuracy', *cost.last[:2]), number('accuracy', *cost.several[:2]), *rounds,
        f'{cost.parameters:,}', f'{size(cost.down)} / {size(cost.up)}', size(cost.whole), f'{cost.minutes:.3g}',
    ]  # fmt: skip


def reached(cost: Cost) -> str:
    """Rounds to the accuracy that they are counted to, and how many runs reached it if not all did."""
    if not cost.several.seeds:
        return ''
    part = f'{cost.rounds.seeds} of {cost.runs}' if cost.rounds.seeds < cost.runs else ''
    if not cost.rounds.seeds:
        return f'{part} runs'
    return f'{cost.rounds.mean:.0f}' + f' ({part})' * bool(part)


def cost_headings(told: list[Cost]) -> list[str]:
    """Headings of what `cost_row` says."""
    goal = told[0].goal
    return ['last round', 'mean of the last', *([] if math.isnan(goal) else [f'rounds to {goal:.1f} %']),
            'parameters', 'client down / up a round', 'all rounds', 'minutes']  # fmt: skip


def cost_name(cost: Cost) -> str:
    """The method, and how many of its runs tell what they cost if not all do."""
    return cost.method + f' ({cost.runs} of {cost.done} runs)' * (cost.runs < cost.done)


def size(count: float) -> str:
    """Bytes as they are printed."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if count < 1000:
            return f'{count:.3g} {unit}'
        count /= 1000
    return f'{count:.3g} TB'

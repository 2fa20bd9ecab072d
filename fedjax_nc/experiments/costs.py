"""What the methods of a study cost: rounds to reach an accuracy, bytes, parameters and time, beside where they end."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_nc.experiments import runner
from fedjax_nc.experiments.study import Study

Found = Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]
"""(method, scene) -> seed -> summary of a finished run."""


class Mean(NamedTuple):
    """Over seeds."""

    mean: float
    std: float  #: NaN for one seed
    seeds: int


class Cost(NamedTuple):
    """One method in one scene. Numbers without a deviation are means over runs; NaN stands for what there is not."""

    method: str
    runs: int  #: that tell what they cost
    done: int  #: that are finished and did not diverge
    last: Mean  #: accuracy in % of the generic model after the last round
    several: Mean  #: its mean over the last rounds
    goal: float  #: accuracy in % to which rounds are counted
    rounds: Mean  #: to it, over the runs that reached it
    parameters: int  #: numbers that are trained
    down: float  #: bytes to a client in a round
    up: float  #: bytes from a client in a round
    whole: float  #: bytes of all rounds
    minutes: float  #: of a run


def mean(numbers: Iterable[float]) -> Mean:
    """Mean and standard deviation over seeds."""
    row = np.array(list(numbers), float)
    if not row.size:
        return Mean(math.nan, math.nan, 0)
    return Mean(float(row.mean()), float(row.std(ddof=1)) if row.size > 1 else math.nan, row.size)


def of(study: Study, found: Found, scene: str, target: float | None = None) -> list[Cost]:
    """What each method cost in a scene, if any run tells.

    Accuracies are those of generic models; methods without one have none here, nor have rows that look at another model
    of a run than the one it ends with, as before calibration.

    Args:
      study: whose methods are told, in order.
      found: finished runs, the baseline's among them.
      scene: one of the study's.
      target: accuracy in % to which rounds are counted; by default where the baseline ends.
    """
    aim, told = goal(study, found, scene, target), []
    for method in study.methods:
        done = sound(found.get((method, scene), {}))
        runs = [summary for summary in done if {'bytes', 'parameters'} <= set(summary)]
        if not runs:
            continue
        final = several = rounds = mean(())
        if not study.apart(method) and all('global_accuracy' in summary for summary in runs):
            final, several = (mean(last(summary)[i] for summary in runs) for i in (0, 1))
            reached = (runner.value(summary, f'{runner.TO}{aim / 100}') for summary in runs)
            rounds = mean(number for number in reached if math.isfinite(number))
        sent = [summary['bytes'] for summary in runs]
        told.append(Cost(
            method, len(runs), len(done), final, several, aim, rounds, runs[0]['parameters']['total'],
            float(np.mean([b['client_down'] for b in sent])), float(np.mean([b['client_up'] for b in sent])),
            float(np.mean([b['down'] + b['up'] for b in sent])),
            float(np.mean([summary['seconds']['total'] for summary in runs])) / 60,
        ))  # fmt: skip
    return told


def goal(study: Study, found: Found, scene: str, target: float | None = None) -> float:
    """The accuracy in % to which rounds are counted: where the baseline ends, if nothing else is said; or NaN."""
    if target is not None:
        return target
    base = [] if study.apart(study.baseline) else sound(found.get((study.baseline, scene), {}))
    return mean(last(summary)[1] for summary in base if 'global_accuracy' in summary).mean


def last(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Accuracy in % of the generic model in the last round, and its mean over the last ones."""
    names = [name for name in summary if name.startswith('global_accuracy_last')]
    return runner.value(summary, 'global_accuracy'), runner.value(summary, names[0]) if names else math.nan


def sound(cell: Mapping[int, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The summaries of a cell that have a curve and did not diverge."""
    return [summary for summary in cell.values() if summary.get('curve') and 'diverged' not in summary]

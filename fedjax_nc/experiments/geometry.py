"""Frames instead of training: how close a sparse ETF comes to what it should be."""

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

from fedjax_nc import _checkpoints, checks, frames
from fedjax_nc.base import Array
from fedjax_nc.experiments import provenance
from fedjax_nc.experiments.setting import Plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry(Plain):
    """One frame, as `frames.sparse_etf` makes it.

    Raises:
      ValueError: when made, for numbers out of range.
    """

    dim: int = 512
    classes: int = 100
    sparsity: float = 0.6
    norm: float = 1.0
    solver: str = 'mma'
    steps: int = 10_000
    fit_norm: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (('dim', 1), ('classes', 2), ('steps', 0)):
            checks.whole(name, getattr(self, name), low)
        checks.seed(self.seed)
        checks.number('sparsity', self.sparsity, high=1, open_high=True)
        for name in ('norm', 'fit_norm'):
            checks.number(name, getattr(self, name), open_low=True)
        if self.solver not in ('mma', 'gram'):
            raise ValueError(f'solver must be mma or gram, not {checks.shown(self.solver)}')

    @property
    def name(self) -> str:
        """That of its folder."""
        return f'frame-{self.digest}'


@functools.lru_cache(maxsize=2)
def fitted(setting: Geometry) -> Array:
    """Its frame. Frames that differ in their length alone are fitted once, which takes minutes at published sizes."""
    made = {name: value for name, value in setting.plain().items() if name not in ('dim', 'classes', 'seed')}
    return frames.sparse_etf(checks.seeded(setting.seed), setting.dim, setting.classes, **made)


def run(setting: Geometry, out: str | Path) -> dict[str, Any]:
    """Makes the frame and measures it. Writes `config.json` and `summary.json` into `out`, and returns the summary."""
    out, begun = Path(out), time.perf_counter()
    with _checkpoints.holding(out):
        seen = frames.frame_quality(setting.norm * fitted(dataclasses.replace(setting, norm=1.0)))._asdict()
        summary = {
            **{name: float(value) for name, value in seen.items()},
            'seconds': {'total': time.perf_counter() - begun},
            **provenance.about(),
        }
        for name, content in (('config', setting.plain()), ('summary', summary)):
            _checkpoints.replace(out / f'{name}.json', json.dumps(content, indent=2) + '\n')
    return summary

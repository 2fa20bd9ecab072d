"""What the workers of the comparison share: the workload as it comes, and the lines they answer.

A worker is a script in this folder, run by a Python that has the peer's package. It reads one JSON object a line and
answers each with one. Whatever libraries print goes to standard error.

    {"workload": "work.npz"}   ->  {"ready": true, "versions": {...}}   "form" may say which way of the peer is meant
    {"ids": [3, 14, 15]}       ->  {"seconds": 0.92}   one round with these clients
    {"save": "weights.npz"}    ->  {"saved": true}     the server's weights, named and laid out as they came
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np


class Workload(NamedTuple):
    """The data of all clients, where training starts, and how a client trains."""

    x: np.ndarray  # [P, H, W, C] uint8 pool
    y: np.ndarray  # [P] int32
    index: np.ndarray  # type: ignore[assignment]  # [K, N] rows of the pool; the first `size[k]` are real
    size: np.ndarray  # [K] int32
    counts: np.ndarray  # [K, 10] label histograms
    weights: dict[str, np.ndarray]  # 'params/body/Conv_0/kernel' and the like, laid out as in flax
    settings: dict[str, Any]  # see `side_by_side.pack`

    def rows(self, client: int) -> np.ndarray:
        """The client's rows of the pool."""
        return self.index[client, : self.size[client]]


class Worker(Protocol):
    """One framework with the workload loaded."""

    versions: dict[str, Any]

    def round(self, ids: list[int]) -> None: ...

    def weights(self) -> dict[str, np.ndarray]: ...


def load(path: str) -> Workload:
    with np.load(path) as file:
        weights = {name: file[name] for name in file.files if '/' in name}
        data = [file[name] for name in ('x', 'y', 'index', 'size', 'counts')]
        return Workload(*data, weights, json.loads(str(file['settings'])))


class Channel:
    """The lines from and to the benchmark. The first one is read at once: it names the workload and the form."""

    def __init__(self) -> None:
        if sys.platform == 'linux':  # a benchmark that is killed takes a worker with it, whatever that is busy with
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        self.answers = os.fdopen(os.dup(1), 'w')
        os.dup2(2, 1)
        first = next(self.commands())
        self.path: str = first['workload']
        self.form: str = first.get('form', '')

    def commands(self) -> Iterator[dict[str, Any]]:
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, **values: Any) -> None:
        print(json.dumps(values), file=self.answers, flush=True)

    def serve(self, worker: Worker) -> None:
        """Carries out commands until there are no more."""
        self.answer(ready=True, versions=worker.versions)
        for command in self.commands():
            if 'save' in command:
                np.savez(command['save'], **worker.weights())
                self.answer(saved=True)
            else:
                start = time.perf_counter()
                worker.round(command['ids'])
                self.answer(seconds=time.perf_counter() - start)

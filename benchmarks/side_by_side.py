"""The host's side of the comparison: the peers as processes of their own Python, which play rounds in turn with ours.

What a worker must answer is told in `peers/serving.py`.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_nc.base import FederatedData, Variables

WORKERS = Path(__file__).parent / 'peers'


class Package(NamedTuple):
    """How a peer is called and how it is installed."""

    name: str
    install: str


TORCH = 'pip install torch==2.13.0'
PACKAGES = {
    'pytorch': Package('PyTorch', TORCH),
    'pytorch-channels-last': Package('PyTorch channels-last', TORCH),
    'pytorch-compile': Package('PyTorch compiled', TORCH),
    'pytorch-graphs': Package('PyTorch CUDA graphs', TORCH),
    'pytorch-vmap': Package('PyTorch vmap', TORCH),
    'fedjax': Package('FedJAX', 'pip install fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3 dm-haiku==0.0.17 optax==0.2.8'),
    'flower': Package('Flower', "pip install 'flwr[simulation]==1.41.0' torch==2.13.0"),
    'pfl': Package('pfl-research', "pip install 'pfl[pytorch]==0.6.0' torch==2.13.0"),
}


def named(v: Variables) -> dict[str, np.ndarray]:
    """The model's arrays by their paths: 'params/body/Conv_0/kernel' and the like."""
    leaves = jax.tree_util.tree_flatten_with_path(v)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): np.array(leaf) for path, leaf in leaves}


def form(peer: str) -> str:
    """Which way of PyTorch is meant: '' for the plain one, and for other packages."""
    return peer.partition('-')[2]


def pack(path: Path, data: FederatedData, start: Variables, **settings: Any) -> None:
    """Writes what every worker reads.

    Settings: algorithm, model, norm, widths, batch_size, epochs, sgd (lr, momentum, weight_decay), bfloat16, device
    ('cpu' or 'cuda'), tf32 (whether NVIDIA GPUs may use it for float32) and threads (None for the peer's own choice).
    Whether all clients are of one size is added to them.
    """
    arrays = {name: np.asarray(array) for name, array in data._asdict().items()}
    np.savez(path, **arrays, **named(start), settings=json.dumps(settings))


def fit(peer: str, settings: dict[str, Any]) -> bool:
    """Whether a peer has this workload; if not, a line on standard error says so."""
    common = settings['algorithm'] == 'fedavg' and settings['model'] != 'resnet20'
    why = ''
    if peer == 'pytorch-graphs' and settings['device'] == 'cpu':
        why = 'it needs an NVIDIA GPU'
    elif peer == 'pytorch-vmap' and not settings['equal']:
        why = 'it takes part with clients of one size only (--samples)'
    elif peer == 'pytorch-vmap' and settings['model'] == 'resnet20' and settings['norm'] == 'batch':
        why = 'it cannot move the statistics of BatchNorm (--norm group)'
    elif not peer.startswith('pytorch') and (not common or settings['bfloat16'] or settings['device'] != 'cpu'):
        why = 'it takes part on a CPU, in float32, with FedAvg of mlp, cnn or cnn_mcmahan only'
    if why:
        print(f'Not compared with {PACKAGES[peer].name}: {why}', file=sys.stderr)
    return not why


class Peer:
    """A worker process. One that fails is left out from then on, which a line on standard error says.

    It begins to load the workload at once; `ready` waits until it has, so that several can do so side by side.
    """

    def __init__(self, peer: str, python: str, workload: Path, folder: Path = WORKERS) -> None:
        (self.name, self.install), self.python = PACKAGES[peer], python
        self.seconds = list[float]()
        self.log = tempfile.TemporaryFile('w+')  # noqa: SIM115  (as long as the process)
        self.process: subprocess.Popen[str] | None = None
        script = folder / f'{peer.partition("-")[0]}_worker.py'
        try:
            self.process = subprocess.Popen(
                [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
            )
        except OSError as problem:
            self.leave_out(str(problem))
        self.versions = dict[str, Any]()
        self.tell(workload=str(workload), form=form(peer))

    def ready(self) -> 'Peer':
        """Itself, once it has loaded the workload or failed to."""
        self.versions = self.answer().get('versions', {})
        return self

    def ask(self, **command: Any) -> dict[str, Any]:
        """The worker's answer; none once it has failed."""
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        """Sends a command; whether it has arrived, the answer shows."""
        if self.process is not None:
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(command) + '\n')
                self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the worker says next; nothing once it has failed."""
        if self.process is None:
            return {}
        assert self.process.stdout
        if answer := self.process.stdout.readline():
            return json.loads(answer)
        self.close()
        self.log.seek(0)
        said = [line.strip() for line in self.log if line.strip()]
        self.leave_out(said[-1] if said else 'it ended without a word')
        return {}

    def leave_out(self, reason: str) -> None:
        venv = f'python3 -m venv VENV && VENV/bin/{self.install}'
        print(f'Not compared with {self.name}: {reason} [{self.python}]. To install it: {venv}', file=sys.stderr)
        self.process, self.seconds = None, []

    def round(self, ids: list[int], timed: bool = True) -> None:
        """One round of these clients; its time is the worker's own."""
        seconds = self.ask(ids=ids).get('seconds')
        if timed and seconds is not None:
            self.seconds.append(seconds)

    def results(self) -> dict[str, Any]:
        best, median = min(self.seconds), statistics.median(self.seconds)
        return {'seconds_per_round': best, 'median_seconds_per_round': median, 'versions': self.versions}

    def close(self) -> None:
        """Ends the process by ending its input."""
        if self.process is None:
            return
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process = None

"""Watching a run from elsewhere: trackers for `training.run(on_round=...)`.

    with watch.tensorboard('runs/board') as tracker:
        training.run(algorithm, key, state, data, rounds=200, on_round=tracker)

A tracker is a function of a round's row and the state after it, so that one of your own is a few lines, and several are
a loop. A resumed run tells them only of the rounds that are new.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_nc._checkpoints import Row
from fedjax_nc.base import State
from fedjax_nc.training import OnRound


@contextlib.contextmanager
def tensorboard(folder: str | Path) -> Iterator[OnRound]:
    """Writes events that TensorBoard shows into `folder`: a scalar for each entry of a row, at the round's number.

    To be entered by `with`, which gives the tracker and in the end closes the files.

    Raises:
      ImportError: without tensorboardX.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError('TensorBoard\'s events need tensorboardX: pip install "fedjax_nc[watch]"') from error
    with contextlib.ExitStack() as opened:
        writer: Any = None

        def tracker(row: Row, state: State) -> None:
            nonlocal writer
            if writer is None:  # a run that is refused leaves no file
                writer = opened.enter_context(SummaryWriter(str(folder)))
            for name, value in _measured(row).items():
                writer.add_scalar(name, value, int(row['round']))

        yield tracker


def wandb(run: Any) -> OnRound:
    """A tracker for a `run` of Weights & Biases, `wandb.init(...)`, which stays the caller's to finish."""

    def tracker(row: Row, state: State) -> None:
        run.log(_measured(row), step=int(row['round']))

    return tracker


def mlflow(client: Any) -> OnRound:
    """A tracker for MLflow; `client` is its module, with an active run: `mlflow.start_run(); watch.mlflow(mlflow)`."""

    def tracker(row: Row, state: State) -> None:
        client.log_metrics(_measured(row), step=int(row['round']))

    return tracker


def _measured(row: Row) -> Row:
    """A row without its number."""
    return {name: value for name, value in row.items() if name != 'round'}

"""A run that is done: what it was, what came of it, and its models."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_nc import checks, saving, simulate
from fedjax_nc.base import Algorithm, Array, FederatedData, State
from fedjax_nc.data import Dataset
from fedjax_nc.experiments import pipeline, provenance, scene
from fedjax_nc.experiments.setting import Setting


class Finished(NamedTuple):
    """A run with one of its models."""

    setting: Setting  #: what was run
    summary: dict[str, Any]  #: what `summary.json` holds
    algorithm: Algorithm  #: what the model predicts by
    saved: saving.Saved  #: its arrays, and what its file says

    def predict(self, x: Array) -> Array:
        """Logits [B, C] float32 of examples [B, ...] as the data hold them: preprocessing is the model's part."""
        return self.algorithm.predict(self.saved.server, self.saved.client, x)


def load(out: str | Path, client: int | None = None) -> Finished:
    """A finished run's model, ready to predict. Needs none of its data.

    Args:
      out: the run's folder, as `experiments.run` had it, or in that of a study `runs/NAME`.
      client: whose personal model; by default the generic one. There are personal ones where the run was asked to
        keep them: `run(keep_personal=True)`, `--keep-personal`.

    Returns:
      The run; with a warning where a file of one's own has changed that its method, model or their like is in. With
      `predict` go `algorithm` and `saved`, for `evaluate` or to train on, as from `saving.load`.

    Raises:
      FileNotFoundError: if there is no such run, it has not been finished, or has no such model.
      ValueError: for damaged files, a setting that cannot be any more, and as `saving.load`.

    Example:
      >>> import tempfile
      >>> from fedjax_nc import data, experiments
      >>> small = {'dataset': 'digits', 'max_examples': 300, 'clients': 5, 'rounds': 2, 'local_epochs': 1}
      >>> with tempfile.TemporaryDirectory() as out:
      ...     summary = experiments.run(experiments.Setting(**small), out, progress=False)
      ...     run = experiments.load(out)
      >>> digits = data.load_dataset('digits')
      >>> logits = run.predict(digits.x_test)
      >>> bool((logits.argmax(-1) == digits.y_test).mean() == summary['global_accuracy'])
      True
    """
    out = Path(out)
    if client is not None:
        checks.whole('client', client, 0)
    if not (out / 'summary.json').exists():
        begun = (out / 'config.json').exists()
        raise FileNotFoundError(
            f'the run in {out} has not been finished: go on with resume=True' if begun else f'{out} holds no run'
        )
    summary, config = pipeline.known(out / 'summary.json'), pipeline.known(out / 'config.json')
    setting = Setting.among(config)
    path = out / (pipeline.MODEL if client is None else pipeline.PERSONAL.format(client))
    if not path.exists():
        if 'diverged' in summary:
            said = f'the run in {out} has no model: {summary["diverged"]}'
        elif client is None:
            none = 'global_accuracy' not in summary
            said = f'{setting.label} has no generic model: name a client' if none else f'{path} is gone'
        elif path.parent.exists():
            why = 'it never took part' if client < setting.clients else f'it had {setting.clients} clients'
            said = f'{out} has no model of client {client}: {why}'
        else:
            said = f'{out} has no personal models: ask for them with keep_personal=True, or --keep-personal'
        raise FileNotFoundError(said)
    if what := pipeline.replaced(config, dataclasses.replace(setting, probes=()), provenance.running):
        warnings.warn(f'the file of the {what} of {out} has changed since: this may be another model', stacklevel=2)
    algorithm, like = stage(setting, saving.about(path), personal=client is not None)
    return Finished(setting, summary, algorithm, saving.load(path, algorithm, like))


def stage(setting: Setting, about: dict[str, Any], personal: bool) -> tuple[Algorithm, State]:
    """What predicts with a run's models, generic or personal, and the shapes of the state that they are of."""
    train = saving.clients(about)
    classes, shape, dtype = train.num_classes, train.x.shape[1:], train.x.dtype
    x, y = np.zeros((classes, *shape), dtype), np.arange(classes, dtype=np.int32)
    recipe = scene.build(setting, Dataset(x, y, x, y, classes, 'stand-in'))

    def begun(key: Array, data: FederatedData) -> State:
        """The state that the generic model is of, or the one that the clients' are."""
        state = simulate.init(recipe.train, key, data)
        if recipe.calibrate is not None:
            state = simulate.join(recipe.calibrate, key, state.server, data.num_clients)
        return recipe.enter(recipe.personalize, key, state, data) if personal and recipe.personalize else state

    state = jax.eval_shape(begun, checks.seeded(0), train)
    return recipe.final if personal else recipe.general, state

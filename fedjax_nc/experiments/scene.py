"""From a setting to its data and its method."""

import inspect
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks, data, local, simulate, tree, tuning
from fedjax_nc._differences import in_one_line
from fedjax_nc.base import FederatedData, State
from fedjax_nc.data import containers, hub, images
from fedjax_nc.data.partition import Parts
from fedjax_nc.experiments import networks, recipes
from fedjax_nc.experiments.setting import FEATURES, LOADERS, NATURAL, PIXELS, Setting, divided

ETF: dict[str, dict[str, Any]] = {
    'cnn': {'dim': 64, 'scale': 10.0}
}  # FedETF's frame and first temperature; C and 1 for the other models

OF_DATA = (
    'dataset', 'loading', 'max_examples', 'imbalance', 'clients', 'partition', 'alpha', 'classes_per_client',
    'most_classes', 'exponent', 'min_size', 'features', 'noise', 'tests', 'test_share', 'validation', 'seed',
)  # fmt: skip
"""Settings that `load` looks at."""

Scene = tuple[data.Dataset, FederatedData, FederatedData]
"""The data set, the clients' training data and their local tests."""


def check(setting: Setting) -> None:
    """Raises ValueError for a head, loss, server optimizer or option that the method does not have; needs no data."""
    x, y = np.zeros((2, 1), np.float32), np.arange(2, dtype=np.int32)
    build(setting, data.Dataset(x, y, x, y, 2, 'stand-in'))


def misfit(setting: Setting, scene: Scene) -> ValueError | None:
    """What a method raises on its data, as far as that shows without computing: its first model is made of shapes."""
    dataset, train, _ = scene
    try:
        recipe = build(setting, dataset)
        state = jax.eval_shape(lambda key: simulate.init(recipe.train, key, train), checks.seeded(0))
        same_model(recipe, setting.label, state, train)
    except ValueError as error:
        return error.with_traceback(None)  # whose frames hold the data
    except Exception as error:  # whatever a user's own part raises
        names = (setting.algorithm, setting.model, setting.head, setting.loss, setting.server_optimizer)
        if not any(':' in str(name) for name in names):
            raise
        return ValueError(in_one_line(error))
    return None


def same_model(recipe: recipes.Recipe, label: str, state: State, train: FederatedData) -> None:
    """Refuses a stage after training whose model has parts of other names: it would predict without what was trained.

    Args:
      recipe: the method.
      label: what it is called.
      state: the state before the first round, or its shapes.
      train: what it is made of.

    Raises:
      ValueError: if names of parameters, or of what is frozen, are in one of the two alone.
    """
    stage, trained = recipe.personalize, getattr(state.server, 'variables', None)
    if stage is None or trained is None or recipe.enter is not recipes.join:
        return
    try:
        tuned = jax.eval_shape(lambda key: stage.init(key, train), checks.seeded(0)).variables
    except Exception:  # a stage of one's own need not be able to begin by itself
        return
    has, takes = (set(tree.by_path({**v.params, 'frozen': v.fixed})) for v in (trained, tuned))
    if has != takes:
        missing, more = (', '.join(sorted(names)) or 'nothing' for names in (has - takes, takes - has))
        raise ValueError(
            f'{label}: the stage that makes personal models has another model than training has, without {missing}, '
            f'with {more} beside it: give it the task of training, as in setup.finetune(task)'
        )


def key(setting: Setting) -> str:
    """What the data of a run depend on, as text: runs that have it in common have one scene."""
    return json.dumps({name: value for name, value in setting.plain().items() if name in OF_DATA}, sort_keys=True)


def method_key(setting: Setting) -> str:
    """All else of a run, as text: `check` says the same of runs that have it in common."""
    return json.dumps({name: value for name, value in setting.plain().items() if name not in OF_DATA}, sort_keys=True)


def load(setting: Setting, data_dir: str | Path | None = None, host: bool = False) -> Scene:
    """The data of a run, whose examples stay on the host with `host`.

    Raises:
      ValueError: for a partition that cannot be, and as `data.load_dataset`.
    """
    dataset = found(setting, data_dir)
    if setting.max_examples:
        dataset = data.subset(dataset, setting.max_examples, setting.seed)
    if setting.imbalance > 1:
        dataset = data.keep(dataset, data.long_tail(dataset.y_train, setting.imbalance, seed=setting.seed))
    owners = np.arange(0)
    if setting.partition == NATURAL:
        owners, parts = drawn(dataset, setting)
    else:
        parts = divided(dataset.y_train, setting, dataset.clients_train)
    pool = FEATURES[setting.features](dataset.x_train, parts, setting)
    floats = pool.dtype != dataset.x_train.dtype  # noise makes them, in [0, 1], of bytes: tests must be the same
    ready = floats and not pipelined(setting)  # no pipeline takes them on from there, as models do bytes
    clients = data.federate(2 * pool - 1 if ready else pool, dataset.y_train, parts, dataset.num_classes, host=host)
    tests = None
    if setting.tests == 'split':
        clients, tests = data.split(clients, setting.test_share, seed=setting.seed)
    if setting.validation:
        dataset, clients, tests = validated(dataset, clients, setting)
    if floats:
        x = dataset.x_test.astype(pool.dtype) / 255
        dataset = dataset._replace(x_test=2 * x - 1 if ready else x)
    x, y = dataset.x_test, dataset.y_test
    if setting.tests == 'matched':
        tests = data.matched_tests(clients.counts, x, y, total=len(y), seed=setting.seed)
    elif setting.tests == 'common':
        tests = data.common_test(x, y, setting.clients, dataset.num_classes)
    elif tests is None:
        if dataset.clients_test is None:
            raise ValueError(
                f"the test set of {setting.dataset} is nobody's: take tests 'split', 'matched' or 'common'"
            )
        tests = data.federate(x, y, data.natural(dataset.clients_test, owners), dataset.num_classes, allow_empty=True)
    if not int(tests.size.sum()):
        raise ValueError(
            f'no client has a test example with tests {setting.tests!r}: take another kind, or a larger share'
        )
    return dataset, clients, tests


def validated(dataset: data.Dataset, clients: FederatedData, setting: Setting) -> Scene:
    """A scene in which examples that clients have held back take the place of the test set.

    Raises:
      ValueError: if the share is so small that nothing is held back.
    """
    clients, tests = data.split(clients, setting.validation, seed=setting.seed)
    rows = np.setdiff1d(members(tests), members(clients))  # clients may share examples
    if not len(rows):
        raise ValueError(
            f'validation {setting.validation:g} holds back nothing of clients of at most {clients.size.max()} '
            'examples: raise it'
        )
    x, y = dataset.x_train[rows], dataset.y_train[rows]
    rest = data.keep(dataset, np.setdiff1d(np.arange(len(dataset.y_train)), rows))
    return rest._replace(x_test=x, y_test=y, clients_test=None), clients, tests


def members(clients: FederatedData) -> NDArray[np.intp]:
    """The rows that clients hold, ascending."""
    index, size = np.asarray(clients.index), np.asarray(clients.size)
    return np.unique(index[np.arange(index.shape[1]) < size[:, None]])


def found(setting: Setting, data_dir: str | Path | None = None) -> data.Dataset:
    """The data set of a setting, all of it.

    Raises:
      ValueError: if `loading` does not say what its loader needs, and as the loader.
    """
    if setting.own is None:
        return data.load_dataset(setting.dataset, data_dir)
    path = Path(data_dir or '.') / setting.dataset
    load, where = LOADERS[setting.own], {}
    if load is data.load_folder:
        load, where = (data.load_hub, {}) if hub.saved(path) else (load, {'cache': data_dir})
    if taken := [name for name in setting.loading if name in where]:
        raise ValueError(f'loading of {setting.dataset}: {taken[0]} is the data directory, which is given beside it')
    try:
        inspect.signature(load).bind(path, **setting.loading, **where)
    except TypeError as error:
        raise ValueError(f'loading of {setting.dataset}: {error}, of {load.__name__}') from error
    return load(path, **setting.loading, **where)


def digest(setting: Setting, data_dir: str | Path | None = None) -> str:
    """That of a file or folder of one's own; '' of other data, and of what cannot be read."""
    if setting.own is None:
        return ''
    try:
        return containers.digest(Path(data_dir or '.') / setting.dataset)
    except (OSError, ValueError):
        return ''


def drawn(dataset: data.Dataset, setting: Setting) -> tuple[NDArray[np.intp], Parts]:
    """The ids of a run's natural clients, ascending, and their rows.

    Raises:
      ValueError: if there are none, or not as many.
    """
    if dataset.clients_train is None:
        raise ValueError(
            f'{setting.dataset} has no clients of its own: name their column or folders, or take another partition'
        )
    there = np.unique(dataset.clients_train)
    if setting.clients > len(there):
        raise ValueError(f'{setting.dataset} has {len(there)} clients of its own, not {setting.clients}: lower clients')
    owners = np.sort(np.random.default_rng(setting.seed).permutation(there)[: setting.clients])
    return owners, data.natural(dataset.clients_train, owners)


def pipelined(setting: Setting) -> bool:
    """Whether images go through a pipeline of the setting; else models make [-1, 1] of bytes and leave floats alone."""
    return bool(setting.crop or setting.flip or setting.pixels != 'half')


def build(setting: Setting, dataset: data.Dataset, choice: tuning.Choice | None = None) -> recipes.Recipe:
    """The method of a run. `choice` says how it is computed: the convolution of its model, what its plan adds.

    Raises:
      ValueError: for a head, loss, server optimizer or option that the method does not have.
    """
    choice, augment = choice or tuning.Choice(), None
    if pipelined(setting):
        look = PIXELS[setting.pixels]
        augment = images.pipeline(*look, crop=setting.crop, flip=setting.flip, crop_mode=setting.crop_mode)
    server_opt, plain = None, setting.server_optimizer == 'average'
    if not (plain and setting.server_lr == 1 and not setting.server_momentum):
        make, *_ = recipes.server_optimizer(setting.server_optimizer)
        server_opt = make(setting.server_lr, setting.server_momentum)
    held = None
    if setting.algorithm == 'ratioloss':
        held = recipes.auxiliary(dataset.x_train, dataset.y_train, dataset.num_classes)
    model = networks.build(
        setting.model, norm=setting.norm, precision=setting.precision, conv=choice.convolution(), preprocess=augment
    )
    return recipes.named(setting.algorithm)(
        model,
        local.sgd(setting.lr, setting.momentum, setting.weight_decay, setting.lr_decay, setting.clip or None),
        local.Plan(setting.batch_size, setting.local_epochs, choice.tails, choice.narrower),
        head=setting.head, loss=setting.loss, server_opt=server_opt,
        personal_opt=local.sgd(setting.lr, setting.personal_momentum, 0.0, setting.lr_decay), rounds=setting.rounds,
        auxiliary=held, weigh=setting.weigh, personal=setting.personal, options=dict(setting.options),
        **ETF.get(setting.model, {}),
    )  # fmt: skip

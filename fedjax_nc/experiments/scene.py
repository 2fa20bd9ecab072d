"""From a setting to its data and its method."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from fedjax_nc import data, local, models
from fedjax_nc.base import FederatedData
from fedjax_nc.data import images
from fedjax_nc.experiments import recipes
from fedjax_nc.experiments.setting import MODELS, PARTITIONS, PIXELS, Setting
from fedjax_nc.models.convolution import ConvFn

ETF: dict[str, dict[str, Any]] = {
    'cnn': {'dim': 64, 'scale': 10.0}
}  # FedETF's frame and first temperature; C and 1 for the other models

Scene = tuple[data.Dataset, FederatedData, FederatedData]
"""The data set, the clients' training data and their local tests."""


def load(setting: Setting, data_dir: str | Path | None = None) -> Scene:
    """The data of a run.

    Raises:
      ValueError: for a partition that cannot be, and as `data.load_dataset`.
    """
    if setting.dataset.endswith('.npz'):
        dataset = data.load_npz(Path(data_dir or '.') / setting.dataset)
    else:
        dataset = data.load_dataset(setting.dataset, data_dir)
    if setting.max_examples:
        dataset = data.subset(dataset, setting.max_examples, setting.seed)
    if setting.imbalance > 1:
        kept = data.long_tail(dataset.y_train, setting.imbalance, seed=setting.seed)
        dataset = dataset._replace(x_train=dataset.x_train[kept], y_train=dataset.y_train[kept])
    parts = PARTITIONS[setting.partition](dataset.y_train, setting)
    clients = data.federate(dataset.x_train, dataset.y_train, parts, dataset.num_classes)
    x, y = dataset.x_test, dataset.y_test
    if setting.tests == 'matched':
        tests = data.matched_tests(clients.counts, x, y, total=len(y), seed=setting.seed)
    elif setting.tests == 'common':
        tests = data.common_test(x, y, setting.clients, dataset.num_classes)
    else:
        clients, tests = data.split(clients, setting.test_share, seed=setting.seed)
    if not int(tests.size.sum()):
        raise ValueError(
            f'no client has a test example with tests {setting.tests!r}: take another kind, or a larger share'
        )
    return dataset, clients, tests


def build(setting: Setting, dataset: data.Dataset, conv: ConvFn | None = None) -> recipes.Recipe:
    """The method of a run. `conv` is the convolution of its model, by default the library's choice.

    Raises:
      ValueError: for a head, loss, server optimizer or option that the method does not have.
    """
    norm = {'norm': setting.norm} if setting.model.startswith(('resnet', 'mobilenet')) else {}
    form = {} if conv is None or setting.model == 'mlp' else {'conv': conv}
    module = MODELS[setting.model](dtype=jnp.dtype(setting.precision), **norm, **form)
    augment = None
    if setting.crop or setting.flip or setting.pixels != 'half':
        look = PIXELS[setting.pixels]
        augment = images.pipeline(*look, crop=setting.crop, flip=setting.flip, crop_mode=setting.crop_mode)
    server_opt, plain = None, setting.server_optimizer == 'average'
    if not (plain and setting.server_lr == 1 and not setting.server_momentum):
        make = recipes.SERVER_OPTIMIZERS['sgd' if plain else setting.server_optimizer]
        server_opt = make(setting.server_lr, setting.server_momentum)
    held = None
    if setting.algorithm == 'ratioloss':
        held = recipes.auxiliary(dataset.x_train, dataset.y_train, dataset.num_classes)
    options = dict(setting.options)
    compares = setting.algorithm in ('moon', 'fedmmd') or options.get('base') == 'moon'
    if augment is not None and compares:
        options, augment = {**options, 'preprocess': augment}, None  # all models that are compared see the same pixels
    return recipes.RECIPES[setting.algorithm](
        models.from_flax(module, augment),
        local.sgd(setting.lr, setting.momentum, setting.weight_decay, setting.lr_decay, setting.clip or None),
        local.Plan(setting.batch_size, setting.local_epochs),
        head=setting.head, loss=setting.loss, server_opt=server_opt,
        personal_opt=local.sgd(setting.lr, 0.0, 0.0, setting.lr_decay), rounds=setting.rounds, auxiliary=held,
        weigh=setting.weigh, personal=setting.personal, options=options, **ETF.get(setting.model, {}),
    )  # fmt: skip

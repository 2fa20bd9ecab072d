"""A run as plain data: everything that its results depend on, and nothing else."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import flax.linen as nn
import numpy as np

from fedjax_nc import checks, data, models
from fedjax_nc.data.partition import Parts
from fedjax_nc.experiments import recipes

DATASETS = ('cifar10', 'cifar100', 'digits')
MODELS: dict[str, Callable[..., nn.Module]] = {
    'mlp': models.MLP,
    'cnn': models.CNN,
    'cnn_mcmahan': models.McMahanCNN,
    'conv2cifar': models.Conv2Cifar,
    'moon_cnn': models.MoonCNN,
    'vgg11': models.VGG11,
    'mobilenet': models.MobileNetV2,
    'resnet20': models.ResNet20,
    'resnet18': models.ResNet18,
    'resnet34': models.ResNet34,
    'resnet50': models.ResNet50,
}
PARTITIONS: dict[str, Callable[[np.ndarray, 'Setting'], Parts]] = {
    'dirichlet': lambda y, s: data.dirichlet(y, s.clients, s.alpha, seed=s.seed),
    'dirichlet_capped': lambda y, s: data.dirichlet_capped(y, s.clients, s.alpha, seed=s.seed),
    'dirichlet_multiclass': lambda y, s: data.dirichlet_multiclass(y, s.clients, s.alpha, seed=s.seed),
    'dirichlet_draws': lambda y, s: data.dirichlet_draws(y, s.clients, s.alpha, seed=s.seed),
    'shards': lambda y, s: data.shards(y, s.clients, s.classes_per_client, seed=s.seed),
    'iid': lambda y, s: data.iid(y, s.clients, seed=s.seed),
}
MODEL = {'cifar10': 'resnet20', 'cifar100': 'resnet20', 'digits': 'mlp'}
LR = {'cifar10': 0.04, 'cifar100': 0.01, 'digits': 0.02}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. The defaults are FedETF's published setting for CIFAR-10.

    Raises:
      ValueError: when made, for an unknown name or a number out of range.
    """

    dataset: str = 'cifar10'
    max_examples: int | None = None  # of the training set, as equally over the classes as it allows; all by default
    imbalance: float = 1.0  # largest over smallest class of a training set made long-tailed; clients are then tested on
    # parts of the test set with their own proportions of classes, as in FedLoGe
    clients: int = 20
    partition: str = None  # type: ignore[assignment]  # by default 'dirichlet', and 'dirichlet_draws' where it is long-tailed
    alpha: float = 0.1  # of Dirichlet partitions
    classes_per_client: int = 2  # of 'shards'
    test_share: float = 0.3  # of each client's examples, where it is not long-tailed
    model: str = None  # type: ignore[assignment]  # by default 'resnet20', and 'mlp' for digits
    norm: str = 'batch'  # or 'group': of ResNets and MobileNet
    precision: str = 'float32'  # or 'bfloat16': of the model's computations
    crop: int = 0  # pixels by which training images are padded and cropped at random
    flip: bool = False  # whether they are mirrored at random
    algorithm: str = 'fedetf'
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further arguments of the algorithm's factory
    head: str | None = None  # by default the algorithm's own, and so are the next three
    loss: str | None = None
    weigh: str | None = None  # 'examples' or 'alike'
    server_optimizer: str | None = None
    server_lr: float | None = None  # by default the server optimizer's own
    lr: float = None  # type: ignore[assignment]  # by default 0.04, 0.01 for cifar100 and 0.02 for digits
    momentum: float = 0.9
    weight_decay: float = 5e-4
    lr_decay: float = 1.0  # factor a round
    clip: float | None = None  # largest norm of a gradient
    batch_size: int = 128
    local_epochs: int = 3
    participation: float = 1.0  # share of the clients in a round
    rounds: int = 200
    eval_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        names = {
            'dataset': DATASETS,
            'partition': (None, *PARTITIONS),
            'model': (None, *MODELS),
            'norm': ('batch', 'group'),
            'precision': ('float32', 'bfloat16'),
            'algorithm': tuple(recipes.RECIPES),
            'head': (None, *recipes.HEADS),
            'loss': (None, *recipes.LOSSES),
            'weigh': tuple(recipes.WEIGHTS),
            'server_optimizer': (None, *recipes.SERVER_OPTIMIZERS),
        }
        for name, known in names.items():
            if (value := getattr(self, name)) not in known:
                possible = ', '.join(u for u in known if u is not None)
                raise ValueError(f'{name} must be one of {possible}, not {checks.shown(value)}')
        for name in ('clients', 'classes_per_client', 'batch_size', 'local_epochs', 'rounds', 'eval_every'):
            checks.whole(name, getattr(self, name))
        for name in ('crop', 'seed'):
            checks.whole(name, getattr(self, name), 0)
        if self.max_examples is not None:
            checks.whole('max_examples', self.max_examples)
        checks.number('imbalance', self.imbalance, 1)
        for name in ('alpha', 'lr', 'server_lr', 'clip'):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), open_low=True)
        for name in ('participation', 'lr_decay'):
            checks.number(name, getattr(self, name), high=1, open_low=True)
        checks.number('momentum', self.momentum, high=1, open_high=True)
        checks.number('weight_decay', self.weight_decay)
        checks.number('test_share', self.test_share, high=1, open_low=True, open_high=True)
        if not isinstance(self.flip, bool):
            raise ValueError(f'flip must be true or false, not {checks.shown(self.flip)}')
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise ValueError(f'options must name arguments of the algorithm, not {checks.shown(self.options)}')
        if (self.crop or self.flip) and self.algorithm in ('moon', 'fedmmd'):
            raise ValueError(f'{self.algorithm} compares models on the same pixels: leave crop and flip out')
        resolved = {
            'model': self.model or MODEL[self.dataset],
            'lr': LR[self.dataset] if self.lr is None else self.lr,
            'partition': self.partition or ('dirichlet_draws' if self.imbalance > 1 else 'dirichlet'),
            'options': dict(self.options),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def cohort(self) -> int:
        """Clients a round."""
        return max(1, round(self.participation * self.clients))

    def plain(self) -> dict[str, Any]:
        """The setting as JSON can hold it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, 'options': dict(self.options)}

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of all that it says: the name of its folder."""
        return hashlib.blake2b(json.dumps(self.plain(), sort_keys=True).encode(), digest_size=6).hexdigest()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """The setting that a mapping describes; what it does not name has its default.

        Raises:
          ValueError: for a name that no setting has, or as the class.
        """
        unknown = sorted(set(plain) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            known = ', '.join(field.name for field in dataclasses.fields(cls))
            raise ValueError(f'no setting is called {", ".join(unknown)}; there are {known}')
        return cls(**plain)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The setting in a JSON or TOML file.

        Raises:
          OSError: if it cannot be read.
          ValueError: if it is neither, or as `of`; with the file's name.
        """
        try:
            return cls.of(described(path))
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error


def described(path: str | Path) -> dict[str, Any]:
    """What a JSON or TOML file says, whether it makes a setting or not.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is neither.
    """
    text = Path(path).read_text()
    plain = tomllib.loads(text) if Path(path).suffix == '.toml' else json.loads(text)
    if not isinstance(plain, dict):
        raise ValueError('it holds no table of settings')
    return plain

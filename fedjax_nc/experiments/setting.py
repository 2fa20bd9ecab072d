"""A run as plain data: everything that its results depend on, and nothing else."""

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedjax_nc import _checkpoints, checks, data
from fedjax_nc._differences import in_one_line
from fedjax_nc.data import images
from fedjax_nc.data.partition import Parts
from fedjax_nc.experiments import networks, own, probes, recipes

DATASETS = data.sources.NAMES
LOADERS: dict[str, Callable[..., data.Dataset]] = {
    '.npz': data.load_npz,
    '.csv': data.load_table,
    '.parquet': data.load_table,
    '/': data.load_folder,
}
"""What loads a file or folder of a user's own, by the end of its name."""
NATURAL = 'natural'  # each client has the examples that are its own, and may have test examples


def uneven_classes(labels: np.ndarray, clients: int, classes_per_client: int, most_classes: int, *, seed: int) -> Parts:
    """That of `data`, whose range of classes is two settings."""
    numbers: Sequence[int] = (classes_per_client, most_classes)
    if clients == 2:  # of which a pair would be the numbers, and no range
        numbers = np.random.default_rng(seed).integers(classes_per_client, most_classes + 1, 2).tolist()
    return data.uneven_classes(labels, clients, numbers, seed=seed)


def by_domain(labels: np.ndarray, clients: int, *, owners: np.ndarray, seed: int) -> Parts:
    """That of `data`, of the ids that say whose an example is."""
    return data.by_domain(owners, clients, seed=seed)


PARTITIONS: dict[str, Callable[..., Parts]] = {
    function.__name__: function
    for function in (
        data.dirichlet, data.dirichlet_capped, data.dirichlet_multiclass, data.dirichlet_draws, data.shards, data.iid,
        data.dirichlet_sizes, data.power_law, uneven_classes, by_domain,
    )
}  # fmt: skip
KNOBS = ('alpha', 'classes_per_client', 'most_classes', 'exponent', 'min_size')
"""Settings that a partition is given where it has an argument of that name."""


def knobs(function: Callable[..., Any]) -> list[str]:
    """Those of `KNOBS` that a partition takes."""
    names, several = own.takes(function)
    return [knob for knob in KNOBS if knob in names or several]


def partition(name: str) -> Callable[..., Parts]:
    """The partition of a name in `PARTITIONS`, or of one's own: 'package.module:function', of a module to import.

    The function is `(labels [n], clients, *, seed, ...) -> parts`, as those of `data` are. Of `alpha`,
    `classes_per_client`, `most_classes`, `exponent` and `min_size` it is given what it names, and as `owners` [n] the
    ids of the data's own clients.

    Raises:
      ValueError: for another name, a module that cannot be imported, or what is no such function in it.
    """
    if not own.is_own('partition', name, (*PARTITIONS, NATURAL), 'function'):
        return PARTITIONS[name]
    function: Callable[..., Parts] = own.attribute('partition', name)
    more = [*knobs(function), *(['owners'] if 'owners' in own.takes(function)[0] else [])]
    checks.called(f'partition {name}', function, 'labels, clients', 'data.iid', by_name=('seed', *more))
    return function


def divided(labels: np.ndarray, setting: 'Setting', owners: np.ndarray | None = None) -> Parts:
    """The rows of each client, as the setting's partition has them, of examples that may be somebody's already.

    Raises:
      ValueError: as the partition, if it needs owners and there are none, and for whatever one of a user's own raises.
    """
    function = partition(setting.partition)
    given: dict[str, Any] = {knob: getattr(setting, knob) for knob in knobs(function)}
    if 'owners' in own.takes(function)[0]:
        if owners is None:
            raise ValueError(
                f'partition {setting.partition} goes by whose an example is, which {setting.dataset} does not say: '
                'name their column or folders, or take another partition'
            )
        given['owners'] = owners
    try:
        return function(labels, setting.clients, seed=setting.seed, **given)
    except Exception as error:
        if setting.partition in PARTITIONS:
            raise
        raise ValueError(f'partition {setting.partition}: {in_one_line(error)}') from error


FEATURES: dict[str, Callable[[Any, Parts, 'Setting'], Any]] = {
    'same': lambda x, parts, s: x,
    'rotated': lambda x, parts, s: data.rotate(x, parts),
    'noisy': lambda x, parts, s: data.add_noise(x, parts, s.noise, seed=s.seed),
}
"""How clients see their examples."""
MODEL = {'digits': 'mlp', 'tiny_imagenet': 'resnet18'}
LR = {'cifar100': 0.01, 'digits': 0.02, 'tiny_imagenet': 0.01}


PIXELS: dict[str, tuple[Any, Any]] = {
    'half': images.HALF,
    'cifar10_ccvr': images.CIFAR10_CCVR,
    'cifar100_ccvr': images.CIFAR100_CCVR,
    'cinic10_ccvr': images.CINIC10_CCVR,
    'cifar10_fednh': images.CIFAR10_FEDNH,
    'cifar100_fednh': images.CIFAR100_FEDNH,
    'cifar10_fedloge': images.CIFAR10_FEDLOGE,
    'cifar100_fedloge': images.CIFAR100_FEDLOGE,
}
"""Mean and deviation of pixels, by the data set and the paper that took them."""
KEPT = ('accuracy', 'accuracy_trained', 'accuracy_averaged', 'many', 'medium', 'few')
"""Metrics of which summaries have means over the last rounds."""
TESTS = ('split', 'matched', 'common', NATURAL)
PERSONAL = ('own', 'latest')


class Plain:
    """A dataclass that is plain data: read from JSON or TOML, written as either, named by what it says."""

    def plain(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of all that it says beyond the defaults, for the name of its folder."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        said = {
            name: value for name, value in self.plain().items() if value != defaults[name] and value not in ({}, [])
        }
        return hashlib.blake2b(json.dumps(plainest(said), sort_keys=True).encode(), digest_size=6).hexdigest()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """What a mapping describes; what it does not name has its default.

        Raises:
          ValueError: for a name that there is not, or as the class.
        """
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(plain) - set(names)):
            raise ValueError(f'no setting is called {", ".join(unknown)}; there are {", ".join(names)}')
        return cls(**plain)

    @classmethod
    def among(cls, plain: Mapping[str, Any]) -> Self:
        """As `of`, of a mapping that says other things, too."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls.of({name: value for name, value in plain.items() if name in names})

    def write(self, path: str | Path) -> None:
        """Writes all fields as TOML or JSON, by the end of the file's name; the file is there whole or as it was.

        Raises:
          OSError: if it cannot be written.
          ValueError: for an option that is None, which TOML has no word for.
        """
        path = Path(path)
        try:
            if path.suffix == '.toml':
                import tomli_w  # which nothing else needs

                written = tomli_w.dumps(self.plain())
            else:
                written = json.dumps(self.plain(), indent=2) + '\n'
        except TypeError as error:
            raise ValueError(f'{path}: {error}; name it .json') from error
        _checkpoints.replace(path, written)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """What a JSON or TOML file describes. Of a run's `config.json` it is the setting alone.

        Raises:
          OSError: if it cannot be read.
          ValueError: if it is neither, or as `of`; with the file's name.
        """
        first = dataclasses.fields(cls)[0].name  # type: ignore[arg-type]
        try:
            plain = described(path)
            return (cls.among if Path(path).name == 'config.json' and first in plain else cls.of)(plain)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(Plain):
    """One run. The defaults are FedETF's published setting for CIFAR-10.

    What is None when it is made has the default that is said beside it: a setting that is made holds no None.
    `Setting.read(path)` reads one from JSON or TOML and `write(path)` writes it, `Setting.of(mapping)` makes one of
    plain data, and `plain()` gives them back.

    Raises:
      ValueError: when made, for an unknown name or a number out of range.
    """

    #: One of `data.load_dataset`; or where data sets lie a file NAME.npz, NAME.csv or NAME.parquet, or a folder NAME/
    #: of images or of Hugging Face's `datasets`. 'cifar10_lt' is 'cifar10' with an imbalance of 100.
    dataset: str = 'cifar10'
    #: Further arguments of what loads a file or folder, such as `{'label': 'species', 'client': 'site'}`.
    loading: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_examples: int = 0  #: Of the training set, as equally over the classes as it allows; 0 is all.
    imbalance: float = 1.0  #: Largest over smallest class of a training set made long-tailed.
    clients: int = 20  #: With 'natural', as many of the data's own, drawn at random.
    #: 'dirichlet', 'dirichlet_capped', 'dirichlet_multiclass', 'dirichlet_draws', 'dirichlet_sizes', 'power_law',
    #: 'shards', 'uneven_classes' or 'iid', each a function of `data`; or 'natural' for the data's own clients, and
    #: 'by_domain' for several clients in the place of each; or `'module:function'` of one's own, see `partition`. By
    #: default 'natural' for femnist, 'dirichlet_draws' where the training set is long-tailed, else 'dirichlet'.
    partition: str = None  # type: ignore[assignment]
    alpha: float = 0.1  #: Of Dirichlet partitions.
    classes_per_client: int = 2  #: Of 'shards', and the fewest of 'uneven_classes'.
    most_classes: int = 5  #: Of 'uneven_classes'.
    exponent: float = 1.0  #: Of 'power_law'.
    min_size: int = 10  #: Examples of the smallest client; of Dirichlet partitions and 'power_law'.
    #: How clients and their 'split' tests see their examples. 'same' is as they are, 'rotated' by quarter turns,
    #: 'noisy' with noise, the more the higher the client's number.
    features: str = 'same'
    noise: float = 0.1  #: Largest variance of 'noisy'.
    #: What clients are tested on. 'split' is a part of their own examples; 'matched', parts of the test set with their
    #: own proportions of classes, as in FedLoGe, and the default where the training set is long-tailed; 'common', the
    #: whole test set, on which classes then count as a client has them, as in FedNH; 'natural', a client's own test
    #: examples, and the default for femnist. Else the default is 'split'.
    tests: str = None  # type: ignore[assignment]
    test_share: float = 0.3  #: Of each client's examples, with 'split'.
    #: Share of each client's training examples that takes the place of the test set, and of clients' tests, for runs by
    #: which options are chosen; 0 is none.
    validation: float = 0.0
    #: 'mlp', 'cnn', 'cnn_mcmahan', 'conv2cifar', 'moon_cnn', 'vgg11', 'mobilenet', 'resnet18', 'resnet20', 'resnet34'
    #: or 'resnet50', networks of `models`; 'mlpnet', the widths of GMV's Table 6, and 'resnet18_fednh', which has no
    #: norms within blocks; or `'module:attribute'` of one's own, see `networks.named`. By default 'resnet20',
    #: 'resnet18' for tiny_imagenet, and 'mlp' for digits and tables.
    model: str = None  # type: ignore[assignment]
    norm: str = 'batch'  #: Or 'group'; of ResNets and MobileNet.
    precision: str = 'float32'  #: Or 'bfloat16'; of the model's computations.
    #: How images are normalised, a constant of `data.images` in small letters, such as 'cifar10_fednh'.
    pixels: str = 'half'
    crop: int = 0  #: Pixels by which training images are padded and cropped at random.
    crop_mode: str = 'constant'  #: How they are padded; with black, or 'reflect'.
    flip: bool = False  #: Whether they are mirrored at random.
    algorithm: str = 'fedetf'  #: One of `recipes.RECIPES`, or `'module:factory'` of one's own, see `recipes.named`.
    #: Further arguments of the algorithm's factory.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: One of `recipes.HEADS`, or `'module:attribute'` of one's own, see `recipes.own_head`; by default the algorithm's.
    head: str = None  # type: ignore[assignment]
    #: One of `recipes.LOSSES`, or `'module:function'` of one's own, see `recipes.own_loss`; by default the algorithm's.
    loss: str = None  # type: ignore[assignment]
    #: How personal models come about. 'own' is as the algorithm's recipe says; 'latest', a client's latest local model,
    #: where the algorithm makes none.
    personal: str = 'own'
    weigh: str = 'published'  #: Or 'examples' or 'alike'; how clients count.
    #: Plain averaging, or one of `recipes.SERVER_OPTIMIZERS`, or `'module:function'` of one's own or of optax's, see
    #: `recipes.server_optimizer`.
    server_optimizer: str = 'average'
    #: By default the server optimizer's own, 1 for 'average'.
    server_lr: float = None  # type: ignore[assignment]
    #: By default the server optimizer's own, 0 for 'average'.
    server_momentum: float = None  # type: ignore[assignment]
    #: Rate of the clients' SGD. By default 0.04, 0.01 for cifar100 and tiny_imagenet, 0.02 for digits.
    lr: float = None  # type: ignore[assignment]
    momentum: float = 0.9  #: Of the clients' SGD.
    personal_momentum: float = 0.0  #: Of the SGD of Ditto's second models and FedROD's personal heads, without decay.
    weight_decay: float = 5e-4  #: Of the clients' SGD.
    lr_decay: float = 1.0  #: Factor a round.
    clip: float = 0.0  #: Largest norm of a gradient; 0 is none.
    batch_size: int = 128  #: Examples of a step.
    local_epochs: int = 3  #: Of a client in a round.
    participation: float = 1.0  #: Share of the clients in a round.
    rounds: int = 200  #: Of training.
    eval_every: int = 1  #: Rounds between evaluations.
    eval_last: int = 5  #: Last rounds, which are all evaluated, and over which the summary has the mean.
    #: What else evaluations measure of the generic model, names of `probes.PROBES`, such as 'collapse', or
    #: `'module:function'` of one's own, see `probes.named`.
    probes: Sequence[str] = ()
    seed: int = 0  #: Of the partition, the first model and everything else that is drawn.

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None and field.default is not dataclasses.MISSING:
                object.__setattr__(self, field.name, field.default)
            object.__setattr__(self, field.name, jsonlike(getattr(self, field.name)))
        if isinstance(self.dataset, str) and self.dataset in data.sources.LONG_TAILED:
            if self.imbalance == 1:
                object.__setattr__(self, 'imbalance', data.sources.IMBALANCE)
            object.__setattr__(self, 'dataset', data.sources.LONG_TAILED[self.dataset])
        names = {
            'tests': (None, *TESTS),
            'norm': ('batch', 'group'),
            'precision': ('float32', 'bfloat16'),
            'pixels': tuple(PIXELS),
            'crop_mode': ('constant', 'reflect'),
            'features': tuple(FEATURES),
            'personal': PERSONAL,
            'weigh': tuple(recipes.WEIGHTS),
        }
        kind = self.own
        if kind is None and self.dataset not in DATASETS:
            possible, files = ', '.join(DATASETS), ', '.join(f'NAME{end}' for end in LOADERS)
            raise ValueError(f'dataset must be one of {possible}, or {files}, not {checks.shown(self.dataset)}')
        if not isinstance(self.loading, Mapping) or not all(isinstance(name, str) for name in self.loading):
            raise ValueError(f'loading must name arguments of what loads a data set, not {checks.shown(self.loading)}')
        if self.loading and kind is None:
            raise ValueError(f'loading is for files and folders of your own, not for {self.dataset}')
        if self.partition == NATURAL and kind is None and self.dataset != 'femnist':
            raise ValueError(f'{self.dataset} has no clients of its own: take another partition than {NATURAL!r}')
        for name, known in names.items():
            if (value := getattr(self, name)) not in known:
                possible = ', '.join(u for u in known if u is not None)
                raise ValueError(f'{name} must be one of {possible}, not {checks.shown(value)}')
        for name, every, mine in (
            ('head', recipes.HEADS, recipes.own_head),
            ('loss', recipes.LOSSES, recipes.own_loss),
        ):
            value = getattr(self, name)
            if value is not None and own.is_own(name, value, every):
                mine(value)
        if self.partition not in (None, NATURAL):
            partition(self.partition)
        checks.number('imbalance', self.imbalance, 1)
        method = recipes.named(self.algorithm)
        if self.model is not None:
            networks.named(self.model)
        _, rate, momentum = recipes.server_optimizer(self.server_optimizer)
        if rate is None and self.server_lr is None:
            raise ValueError(f'server_optimizer {self.server_optimizer} has no rate of its own: give server_lr')
        natural = self.dataset == 'femnist' and self.partition in (None, NATURAL)
        resolved = {
            'model': 'mlp' if kind in ('.csv', '.parquet') else MODEL.get(self.dataset, 'resnet20'),
            'lr': LR.get(self.dataset, 0.04),
            'partition': NATURAL if natural else 'dirichlet_draws' if self.imbalance > 1 else 'dirichlet',
            'tests': NATURAL if natural else 'matched' if self.imbalance > 1 else 'split',
            'head': method.heads[0],
            'loss': method.losses[0],
            'server_lr': rate,
            'server_momentum': momentum,
        }
        for name, value in resolved.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.tests == NATURAL and self.partition != NATURAL:
            raise ValueError(f'tests {NATURAL!r} go with the partition {NATURAL!r}, not with {self.partition!r}')
        for name in (
            'clients',
            'classes_per_client',
            'most_classes',
            'min_size',
            'batch_size',
            'local_epochs',
            'rounds',
            'eval_every',
            'eval_last',
        ):
            checks.whole(name, getattr(self, name))
        if self.partition == 'uneven_classes' and self.most_classes < self.classes_per_client:
            raise ValueError(
                f'most_classes must be at least classes_per_client, {self.classes_per_client}, not {self.most_classes}'
            )
        checks.seed(self.seed)
        for name in ('max_examples', 'crop'):
            checks.whole(name, getattr(self, name), 0)
        for name in ('alpha', 'lr', 'server_lr'):
            checks.number(name, getattr(self, name), open_low=True)
        for name in ('participation', 'lr_decay'):
            checks.number(name, getattr(self, name), high=1, open_low=True)
        for name in ('momentum', 'personal_momentum', 'server_momentum'):
            checks.number(name, getattr(self, name), high=1, open_high=True)
        for name in ('weight_decay', 'clip', 'exponent', 'noise'):
            checks.number(name, getattr(self, name))
        checks.number('validation', self.validation, high=1, open_high=True)
        checks.number('test_share', self.test_share, high=1, open_low=True, open_high=True)
        if not isinstance(self.probes, list) or len(set(map(str, self.probes))) < len(self.probes):
            raise ValueError(f'probes must be a list of different names, not {checks.shown(self.probes)}')
        for name in self.probes:
            probes.named(name)
        if not isinstance(self.flip, bool):
            raise ValueError(f'flip must be true or false, not {checks.shown(self.flip)}')
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise ValueError(f'options must name arguments of the algorithm, not {checks.shown(self.options)}')

    @property
    def own(self) -> str | None:
        """How the name of a user's own data set ends, with '.npz', '.csv', '.parquet' or '/'; None for others."""
        ends = (end for end in LOADERS if isinstance(self.dataset, str) and self.dataset.endswith(end))
        return next(ends, None)

    @property
    def cohort(self) -> int:
        """Clients a round: `participation * clients`, rounded, of two equally near the even one, and at least one."""
        return max(1, round(self.participation * self.clients))

    @property
    def label(self) -> str:
        """What its method is called, which is `algorithm`, or the name of a method of one's own."""
        return self.algorithm if self.algorithm in recipes.RECIPES else recipes.named(self.algorithm).name

    @property
    def name(self) -> str:
        """That of its folder, of method, data set and a digest of all that is not the default."""
        return f'{re.sub(r"[^A-Za-z0-9_.-]+", "_", self.label)}-{Path(self.dataset).stem}-{self.digest}'


def jsonlike(value: Any) -> Any:
    """The same as JSON gives it back: lists for tuples, numbers of Python for those of NumPy."""
    if isinstance(value, Mapping):
        return {name: jsonlike(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonlike(inner) for inner in value]
    return value.item() if hasattr(value, 'item') and not np.ndim(value) else value


def plainest(value: Any) -> Any:
    """The same, with 10.0 as 10: equal settings have one digest."""
    if isinstance(value, Mapping):
        return {name: plainest(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plainest(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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

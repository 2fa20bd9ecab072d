"""What the workers of `parity.py` put around the authors' code so that it runs as it is: on a CPU, in double precision,
on given images in a given order, without packages that it imports and does not need here.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

UNUSED = ('PIL', 'matplotlib', 'pyhessian', 'seaborn', 'six', 'torchvision', 'wandb')
"""Packages that the authors' files import for data, plots and logs."""

Batch = list[list[int]]
"""Rows of the pool, and for each a 1 where its image is mirrored."""


class Work(NamedTuple):
    """What a worker is given."""

    x: Tensor  # [P, C, H, W] the pool
    y: Tensor  # [P]
    test_x: Tensor  # [T, C, H, W]
    test_y: Tensor  # [T]
    rows: list[list[int]]  # each client's rows of the pool
    start: dict[str, np.ndarray]  # 'params/body/Conv_0/kernel' and the like, laid out as in flax
    settings: dict[str, Any]  # as of `authors_ours.Case`


def load(path: str) -> Work:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    settings = json.loads(str(arrays.pop('settings')))
    images = (
        torch.from_numpy(np.ascontiguousarray(arrays.pop(name).transpose(0, 3, 1, 2))) for name in ('x', 'test_x')
    )
    x, test_x = images
    y, test_y = (torch.from_numpy(arrays.pop(name).astype(np.int64)) for name in ('y', 'test_y'))
    return Work(x, y, test_x, test_y, settings['rows'], arrays, settings)


class Examples(torch.utils.data.Dataset):
    """Some rows of a pool, with the attributes that the authors' code asks its datasets for."""

    def __init__(self, x: Tensor, y: Tensor, idxs: Sequence[int]) -> None:
        self.x, self.y, self.idxs = x, y, list(idxs)
        self.targets = y[self.idxs]
        self.indices = self.idxs

    def __len__(self) -> int:
        return len(self.idxs)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        return self.x[self.idxs[item]], self.y[self.idxs[item]]


class Loader:
    """Stands in for `torch.utils.data.DataLoader`: the passes of a client's shuffled loader are those of a plan.

    A loader belongs to the client that holds its rows. Where nothing is planned, and for loaders that are not shuffled,
    examples come in their own order.
    """

    planned: dict[tuple[int, ...], deque[list[Batch]]] = {}  # noqa: RUF012  (one plan for all loaders)
    pool: Work

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False, **_: Any) -> None:
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        passes = self.planned.get(tuple(sorted(getattr(self.dataset, 'idxs', ())))) if self.shuffle else None
        if not passes:
            for at in range(0, len(self.dataset), self.batch_size):
                some = [self.dataset[i] for i in range(at, min(at + self.batch_size, len(self.dataset)))]
                yield torch.stack([x for x, _ in some]), torch.stack([torch.as_tensor(y) for _, y in some])
            return
        for rows, mirrored in passes.popleft():
            x = self.pool.x[rows]
            yield (
                torch.where(torch.tensor(mirrored, dtype=torch.bool)[:, None, None, None], x.flip(3), x),
                self.pool.y[rows],
            )

    @classmethod
    def plan(cls, orders: dict[str, list[list[Batch]]]) -> None:
        """Sets what the clients' loaders will give, pass after pass.

        Raises:
          RuntimeError: if passes of the plan before are left: then the authors' code has done other work than ours.
        """
        if any(cls.planned.values()):
            raise RuntimeError('passes over the data were planned that nobody made')
        cls.planned = {tuple(sorted(cls.pool.rows[int(k)])): deque(passes) for k, passes in orders.items()}


class Hollow(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the unused packages that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split('.')[0] in UNUSED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(checkout: str, work: Work) -> None:
    """Prepares PyTorch and the import of the authors' files. What they call single precision becomes double."""
    sys.meta_path.append(Absent())  # the last: packages that are installed win
    sys.path.insert(0, checkout)
    sys.argv = ['authors']  # their parsers of options find none
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self
    Loader.pool = work
    torch.utils.data.DataLoader = Loader


class Calls:
    """Within `with Calls(module, name, keep) as kept:`, a list of what `keep(result, *args)` makes of each call."""

    def __init__(self, owner: Any, name: str, keep: Callable[..., Any]) -> None:
        self.owner, self.name, self.keep, self.real = owner, name, keep, getattr(owner, name)

    def __enter__(self) -> list[Any]:
        kept: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self.real(*args, **kwargs)
            kept.append(self.keep(result, *args, **kwargs))
            return result

        setattr(self.owner, self.name, call)
        return kept

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.real)


def losses() -> Calls:
    """Keeps the value and the batch size of every cross-entropy."""

    def keep(value: Tensor, *args: Any, **kwargs: Any) -> tuple[float, int]:
        target = kwargs['target'] if 'target' in kwargs else args[1]
        return value.item(), len(target)

    return Calls(nn.functional, 'cross_entropy', keep)


def mean_loss(kept: Iterable[tuple[float, int]]) -> float:
    """The mean over examples, each counted once: several losses of one batch follow each other."""
    values = list(kept)
    return sum(value * n for value, n in values) / sum(n for _, n in values)


def places(net: nn.Module, *heads: str) -> dict[str, Tensor]:
    """A network's tensors under our names, as views turned to our layout.

    Args:
      net: the authors' network; its layers were made in the order in which ours are numbered.
      heads: its layers that are no part of the body.
    """
    kinds = {nn.Conv2d: 'Conv', nn.BatchNorm2d: 'BatchNorm', nn.Linear: 'Dense'}
    out: dict[str, Tensor] = {}
    seen: Counter[str] = Counter()
    channels = 0
    for name, m in net.named_modules():
        if (kind := kinds.get(type(m))) is None or name.split('.')[0] in heads:
            continue
        weight, place = m.weight.detach(), f'{kind}_{seen[kind]}'
        if kind == 'Conv':
            weight, channels = weight.permute(2, 3, 1, 0), m.out_channels
        elif place == 'Dense_0':  # pixels are flattened as [H, W, C] there and as [C, H, W] here
            weight = weight.view(len(weight), channels, -1).permute(2, 1, 0)
        elif kind == 'Dense':
            weight = weight.T
        out[f'params/body/{place}/{"scale" if kind == "BatchNorm" else "kernel"}'] = weight
        if m.bias is not None:
            out[f'params/body/{place}/bias'] = m.bias.detach()
        if kind == 'BatchNorm':
            out |= {f'stats/{place}/mean': m.running_mean, f'stats/{place}/var': m.running_var}
        seen[kind] += 1
    return out


def put(named: dict[str, Tensor], given: dict[str, np.ndarray]) -> None:
    """Copies our arrays into the authors' tensors."""
    for name, mine in named.items():
        mine.copy_(torch.from_numpy(given[name]).reshape(mine.shape))


def read(named: dict[str, Tensor], like: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The authors' tensors as arrays of our shapes, their names after `prefix`."""
    return {prefix + name: mine.detach().numpy().copy().reshape(like[name].shape) for name, mine in named.items()}

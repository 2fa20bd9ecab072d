"""The PyTorch side of the comparison: federated rounds as one writes them by hand, one client after the other.

Eager mode and default settings: NCHW, `torch.nn`, `torch.optim.SGD`. Data stay on the device as bytes.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedjax_nc.base import FederatedData, Variables


class Block(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs),
        )  # fmt: skip
        self.short = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.short(x))


class EtfHead(nn.Module):
    """FedETF's classifier: projection, unit length, frozen frame, learnable temperature."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, classes)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer('frame', torch.eye(classes))

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * (F.normalize(self.proj(z), eps=1e-6) @ self.frame)


def body(model: str, shape: tuple[int, int, int], norm: str, widths: Iterable[int]) -> tuple[nn.Sequential, int]:
    """A feature extractor of images [H, W, C] and how many features it has."""
    height, width, channels = shape
    if model == 'mlp':
        sizes = [height * width * channels, *widths]
        dense = [m for i, o in itertools.pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *dense), sizes[-1]
    if model == 'cnn_mcmahan':
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 512), nn.ReLU(),
        ), 512  # fmt: skip
    if model == 'cnn':
        side = [((s - 2) // 2 - 2) // 2 - 2 for s in (height, width)]
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * math.prod(side), 64), nn.ReLU(),
        ), 64  # fmt: skip
    normed = nn.BatchNorm2d if norm == 'batch' else lambda c: nn.GroupNorm(2, c)
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, 1, 1, bias=False), normed(16), nn.ReLU()]
    inputs = 16
    for stage, outputs in enumerate((16, 32, 64)):
        for block in range(3):
            layers.append(Block(inputs, outputs, 2 if stage and not block else 1, normed))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 64


class Loop:
    """Federated training of one network; `net` holds the server's model between rounds."""

    def __init__(
        self, model: str, data: FederatedData, *, etf: bool, batch_size: int, epochs: int, lr: float, momentum: float,
        weight_decay: float, norm: str = 'batch', widths: Iterable[int] = (200, 200), bfloat16: bool = False,
        device: str = 'cpu',
    ) -> None:  # fmt: skip
        images = np.array(np.asarray(data.x).transpose(0, 3, 1, 2), order='C')
        self.channels = images.shape[1]
        self.x = torch.from_numpy(images).to(device)
        self.y = torch.from_numpy(np.asarray(data.y, np.int64)).to(device)
        index = np.asarray(data.index, np.int64)
        sizes = np.asarray(data.size).tolist()
        self.rows = [torch.from_numpy(index[k, :n]).to(device) for k, n in enumerate(sizes)]
        # FedETF's balanced loss adds the log of the client's class counts to the logits.
        prior = np.log(np.maximum(np.asarray(data.counts), 1)).astype(np.float32)
        self.prior = torch.from_numpy(prior).to(device) if etf else None
        net, dim = body(model, tuple(data.x.shape[1:]), norm, widths)
        head = EtfHead(dim, data.num_classes) if etf else nn.Linear(dim, data.num_classes)
        self.net = nn.Sequential(net, head).to(device)
        self.sgd = {'lr': lr, 'momentum': momentum, 'weight_decay': weight_decay}
        self.versions = {'torch': torch.__version__, 'torch_threads': torch.get_num_threads()}
        self.batch_size, self.epochs, self.bfloat16, self.device = batch_size, epochs, bfloat16, device

    def local(self, client: int) -> None:
        """Trains `net` on one client's examples."""
        rows, prior = self.rows[client], None if self.prior is None else self.prior[client]
        opt = torch.optim.SGD(self.net.parameters(), **self.sgd)
        cast = torch.autocast(self.device, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()
        for _ in range(self.epochs):
            order = rows[torch.randperm(len(rows), device=self.device)]
            for picked in order.split(self.batch_size):
                x, y = self.x[picked], self.y[picked]
                x = (x.float() / 255 - 0.5) / 0.5
                opt.zero_grad()
                with cast:
                    logits = self.net(x)
                logits = logits.float() if prior is None else logits.float() + prior
                F.cross_entropy(logits, y).backward()
                opt.step()

    def round(self, ids: Iterable[int]) -> None:
        """One round of the clients `ids`, averaged by their numbers of examples."""
        self.net.train()
        moving = [t for t in self.net.state_dict().values() if t.is_floating_point()]  # parameters and statistics
        start = [t.clone() for t in moving]
        total, weight = [torch.zeros_like(t) for t in moving], 0
        for k in ids:
            with torch.no_grad():
                for now, first in zip(moving, start, strict=True):
                    now.copy_(first)
            self.local(k)
            n = len(self.rows[k])
            weight += n
            with torch.no_grad():
                for mine, summed in zip(moving, total, strict=True):
                    summed.add_(mine, alpha=n)
        with torch.no_grad():
            for now, summed in zip(moving, total, strict=True):
                now.copy_(summed / weight)
        if self.device != 'cpu':
            torch.cuda.synchronize()

    def load(self, v: Variables) -> None:
        """Takes over the weights of the library's model."""
        with torch.no_grad():
            for mine, theirs in self.pairs(v):
                mine.copy_(torch.from_numpy(np.array(theirs)))

    def difference(self, v: Variables) -> float:
        """Largest difference of any weight or statistic from the library's model."""
        return max(float(np.max(np.abs(mine.detach().cpu().numpy() - theirs))) for mine, theirs in self.pairs(v))

    def pairs(self, v: Variables) -> list[tuple[Tensor, np.ndarray]]:
        """Each tensor with its counterpart, turned to its layout."""
        modules: dict[str, list[Any]] = {'Conv': [], 'Norm': [], 'Dense': []}
        for m in self.net[0].modules():
            kind = {nn.Conv2d: 'Conv', nn.BatchNorm2d: 'Norm', nn.GroupNorm: 'Norm', nn.Linear: 'Dense'}.get(type(m))
            if kind:
                modules[kind].append(m)
        out: list[tuple[Tensor, np.ndarray]] = []
        for name, leaves in v.params['body'].items():
            kind, number = re.fullmatch(r'\w*?(Conv|Norm|Dense)_(\d+)', name).groups()  # type: ignore[union-attr]
            m = modules[kind][int(number)]
            weight = np.asarray(leaves['scale' if kind == 'Norm' else 'kernel'])
            if kind == 'Conv':
                weight = weight.transpose(3, 2, 0, 1)
            elif kind == 'Dense':
                if number == '0':  # pixels are flattened as [H, W, C] there and as [C, H, W] here
                    channels = modules['Conv'][-1].out_channels if modules['Conv'] else self.channels
                    weight = weight.reshape(-1, channels, weight.shape[1]).swapaxes(0, 1).reshape(weight.shape)
                weight = weight.T
            out.append((m.weight, weight))
            if 'bias' in leaves:
                out.append((m.bias, np.asarray(leaves['bias'])))
            if v.stats and kind == 'Norm':
                stats = v.stats[name]
                out += [(m.running_mean, np.asarray(stats['mean'])), (m.running_var, np.asarray(stats['var']))]
        head, params = self.net[1], v.params['head']
        if isinstance(head, EtfHead):
            out += [(head.scale, np.asarray(params['scale'])), (head.frame, np.asarray(v.fixed['v']))]
            head, params = head.proj, params['proj']
        return [*out, (head.weight, np.asarray(params['w']).T), (head.bias, np.asarray(params['b']))]


def build(args: Any, work: Any, data: FederatedData, sgd: dict[str, float]) -> Loop:
    """The loop of a workload, on the same kind of device as JAX uses."""
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    on_gpu = jax.default_backend() == 'gpu'
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            'JAX runs on a GPU and this PyTorch cannot: install PyTorch with CUDA, or set JAX_PLATFORMS=cpu'
        )
    return Loop(
        work.model, data, etf=work.algorithm == 'fedetf', batch_size=work.batch_size, epochs=work.epochs,
        norm=args.norm, widths=args.widths, bfloat16=args.precision == 'bfloat16',
        device='cuda' if on_gpu else 'cpu', **sgd,
    )  # fmt: skip

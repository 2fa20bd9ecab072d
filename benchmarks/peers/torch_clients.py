"""What the peers made of PyTorch share: the networks, and one client's training as one writes it by hand.

Eager mode and default settings: NCHW, `torch.nn`, `torch.optim.SGD`. Data stay on the device as bytes. Whether NVIDIA
GPUs may use TF32 is told by the workload, because the defaults of PyTorch and JAX differ.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from serving import Workload, load
from torch import Tensor, nn


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


class Net(nn.Module):
    """Body and head on images [B, C, H, W] of bytes, with the workload's weights."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        s = work.settings
        self.channels, self.given = work.x.shape[-1], work.weights
        self.body, dim = body(s['model'], work.x.shape[1:], s['norm'], s['widths'])
        head, classes = EtfHead if s['algorithm'] == 'fedetf' else nn.Linear, work.counts.shape[1]
        self.head = head(dim, classes)
        with torch.no_grad():
            for name, mine in self.named().items():
                mine.copy_(torch.from_numpy(work.weights[name]).reshape(mine.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body((x.float() / 255 - 0.5) / 0.5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def weights(self) -> dict[str, np.ndarray]:
        """The weights and statistics now, named and laid out as they were given."""
        named = self.named().items()
        return {name: mine.detach().cpu().numpy().copy().reshape(self.given[name].shape) for name, mine in named}

    def named(self) -> dict[str, Tensor]:
        """This network's tensors under the names of those given, as views turned to the same layout."""
        kinds = {nn.Conv2d: 'Conv', nn.BatchNorm2d: 'BatchNorm', nn.GroupNorm: 'GroupNorm', nn.Linear: 'Dense'}
        out: dict[str, Tensor] = {}
        seen: Counter[str] = Counter()
        channels = self.channels
        for m in self.body.modules():
            if (kind := kinds.get(type(m))) is None:
                continue
            weight, place = m.weight, f'{kind}_{seen[kind]}'
            if kind == 'Conv':
                weight, channels = weight.permute(2, 3, 1, 0), m.out_channels
            elif place == 'Dense_0':  # pixels are flattened as [H, W, C] there and as [C, H, W] here
                weight = weight.view(len(weight), channels, -1).permute(2, 1, 0)
            elif kind == 'Dense':
                weight = weight.T
            out[f'params/body/{place}/{"scale" if "Norm" in kind else "kernel"}'] = weight
            if m.bias is not None:
                out[f'params/body/{place}/bias'] = m.bias
            if kind == 'BatchNorm':
                out |= {f'stats/{place}/mean': m.running_mean, f'stats/{place}/var': m.running_var}
            seen[kind] += 1
        head, place = self.head, 'params/head'
        if isinstance(head, EtfHead):
            out |= {'params/head/scale': head.scale, 'fixed/v': head.frame}
            head, place = head.proj, 'params/head/proj'
        return {**out, f'{place}/w': head.weight.T, f'{place}/b': head.bias}


class Clients:
    """All clients' data and one network that trains on them in turn."""

    def __init__(self, work: Workload) -> None:
        s = work.settings
        if s['device'] == 'cuda' and not torch.cuda.is_available():
            raise ValueError(
                'JAX runs on a GPU and this PyTorch cannot: install PyTorch with CUDA, or set JAX_PLATFORMS=cpu'
            )
        if s['threads']:
            torch.set_num_threads(s['threads'])
        if s['device'] == 'cuda':
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = s['tf32']
        self.device, self.settings = s['device'], s
        self.x = torch.from_numpy(np.array(work.x.transpose(0, 3, 1, 2), order='C')).to(self.device)
        self.y = torch.from_numpy(work.y.astype(np.int64)).to(self.device)
        self.rows = [torch.from_numpy(work.rows(k).astype(np.int64)).to(self.device) for k in range(len(work.size))]
        # FedETF's balanced loss adds the log of the client's class counts to the logits.
        prior = np.log(np.maximum(work.counts, 1)).astype(np.float32)
        self.prior = torch.from_numpy(prior).to(self.device) if s['algorithm'] == 'fedetf' else None
        self.net = Net(work).to(self.device)
        self.versions = {'torch': torch.__version__, 'torch_threads': torch.get_num_threads()}
        if s['device'] == 'cuda':
            allowed = torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
            self.versions |= {'tf32': 'on' if allowed else 'off'}

    def train(self, client: int) -> None:
        """Trains `net` on one client's examples."""
        rows, prior = self.rows[client], None if self.prior is None else self.prior[client]
        opt = self.optimizer()
        for _ in range(self.settings['epochs']):
            order = rows[torch.randperm(len(rows), device=self.device)]
            for picked in order.split(self.settings['batch_size']):
                self.step(opt, picked, prior)

    def optimizer(self) -> torch.optim.Optimizer:
        """A client's, with momentum of zero."""
        return torch.optim.SGD(self.net.parameters(), **self.settings['sgd'])

    def step(self, opt: torch.optim.Optimizer, picked: Tensor, prior: Tensor | None) -> None:
        opt.zero_grad()
        self.loss(self.x[picked], self.y[picked], prior).backward()
        opt.step()

    def loss(self, x: Tensor, y: Tensor, prior: Tensor | None) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.settings['bfloat16']):
            logits = self.net(x)
        return F.cross_entropy(logits.float() if prior is None else logits.float() + prior, y)


@functools.cache
def shared(path: str) -> Clients:
    """The clients as this process has loaded them once."""
    return Clients(load(path))

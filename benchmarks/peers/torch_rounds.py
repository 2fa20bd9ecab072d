"""Rounds of PyTorch: as one writes them first, and in the forms that its documentation gives for speed.

All train the same clients from the same weights by the same steps; weights agree up to rounding. Clients follow each
other, but for `Vmapped`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from serving import Workload
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap
from torch_clients import Clients


class Loop(Clients):
    """One client after the other, in eager mode. `net` holds the server's model between rounds."""

    def round(self, ids: list[int]) -> None:
        """One round of the clients `ids`, averaged by their numbers of examples."""
        self.net.train()
        moving = [t for t in self.net.state_dict().values() if t.is_floating_point()]  # parameters and statistics
        start = [t.clone() for t in moving]
        total, weight = [torch.zeros_like(t) for t in moving], 0
        for k in ids:
            with torch.no_grad():
                for now, first in zip(moving, start, strict=True):
                    now.copy_(first)
            self.train(k)
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

    def weights(self) -> dict[str, np.ndarray]:
        return self.net.weights()


class ChannelsLast(Loop):
    """Images and kernels with channels innermost, cuDNN's algorithms chosen by trial, one optimizer for all clients."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        torch.backends.cudnn.benchmark = True
        self.net.to(memory_format=torch.channels_last)
        self.opt = super().optimizer()
        for p in self.net.parameters():  # there from the start, so that the first step is like all others
            self.opt.state[p]['momentum_buffer'] = torch.zeros_like(p)

    def optimizer(self) -> torch.optim.Optimizer:
        for state in self.opt.state.values():
            state['momentum_buffer'].zero_()
        return self.opt

    def loss(self, x: Tensor, y: Tensor, prior: Tensor | None) -> Tensor:
        return super().loss(x.contiguous(memory_format=torch.channels_last), y, prior)


class Compiled(ChannelsLast):
    """`torch.compile` of the loss, its gradient and the step. What is left over after full batches runs as it is:
    otherwise sizes would become variables, for full batches too."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.fast = torch.compile(super().loss, dynamic=False)
        self.update = torch.compile(self.opt.step)

    def step(self, opt: torch.optim.Optimizer, picked: Tensor, prior: Tensor | None) -> None:
        if len(picked) < self.settings['batch_size']:
            super().step(opt, picked, prior)
            return
        opt.zero_grad()
        try:
            self.fast(self.x[picked], self.y[picked], prior).backward()
            self.update()
        except RuntimeError as problem:  # what it raises fills pages
            said = [line.strip() for line in str(problem).splitlines() if line.strip()]
            raise SystemExit(f'torch.compile failed: {" ".join(said[:2])}') from None


class Graphs(ChannelsLast):
    """A CUDA graph of a whole step, recorded once and replayed for each full batch."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        size = self.settings['batch_size']
        self.picked = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.now = None if self.prior is None else self.prior[0].clone()
        self.net.train()
        moving = list(self.net.state_dict().values())
        start = [t.clone() for t in moving]
        apart = torch.cuda.Stream()
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):  # libraries settle down before anything is recorded
            for _ in range(3):
                super().step(self.opt, self.picked, self.now)
        torch.cuda.current_stream().wait_stream(apart)
        self.opt.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            super().step(self.opt, self.picked, self.now)
        with torch.no_grad():
            for now, first in zip(moving, start, strict=True):
                now.copy_(first)

    def step(self, opt: torch.optim.Optimizer, picked: Tensor, prior: Tensor | None) -> None:
        if len(picked) < self.settings['batch_size']:
            super().step(opt, picked, prior)
            return
        self.picked.copy_(picked)
        if self.now is not None and prior is not None:
            self.now.copy_(prior)
        self.graph.replay()


class Vmapped(Clients):
    """All clients of a round side by side by `torch.func.vmap`: for clients of one size and networks without BatchNorm,
    whose statistics it cannot move."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        torch.backends.cudnn.benchmark = True

    def round(self, ids: list[int]) -> None:
        self.net.train()
        rows = torch.stack([self.rows[k] for k in ids])
        prior = None if self.prior is None else self.prior[ids]
        params, buffers = stack_module_state([self.net] * len(ids))  # type: ignore[arg-type]
        opt = torch.optim.SGD(params.values(), **self.settings['sgd'])
        gradients = vmap(grad(self.one), in_dims=(0, 0, 0, 0, None if prior is None else 0))
        for _ in range(self.settings['epochs']):
            order = rows.gather(1, torch.rand(rows.shape, device=self.device).argsort(1))
            for picked in order.split(self.settings['batch_size'], dim=1):
                found = gradients(params, buffers, self.x[picked], self.y[picked], prior)
                for name, p in params.items():
                    p.grad = found[name]
                opt.step()
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(params[name].mean(0))  # all have as many examples
        if self.device != 'cpu':
            torch.cuda.synchronize()

    def one(self, params: dict, buffers: dict, x: Tensor, y: Tensor, prior: Tensor | None) -> Tensor:
        """The loss of one client."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.settings['bfloat16']):
            logits = functional_call(self.net, (params, buffers), (x,))
        return F.cross_entropy(logits.float() if prior is None else logits.float() + prior, y)

    def weights(self) -> dict[str, np.ndarray]:
        return self.net.weights()


FORMS = {'': Loop, 'channels-last': ChannelsLast, 'compile': Compiled, 'graphs': Graphs, 'vmap': Vmapped}

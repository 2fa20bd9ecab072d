"""Federated rounds as one writes them by hand in PyTorch, one client after the other."""

import numpy as np
import serving
import torch
from torch_clients import Clients


class Loop(Clients):
    """`net` holds the server's model between rounds."""

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


if __name__ == '__main__':
    channel = serving.Channel()
    channel.serve(Loop(serving.load(channel.path)))

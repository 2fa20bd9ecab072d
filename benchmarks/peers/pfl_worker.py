"""pfl-research: its FederatedAveraging on a PyTorchModel in the SimulatedBackend, one process."""

import functools
from importlib.metadata import version

import numpy as np
import serving
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch_clients import Clients


class Rounds(Clients):
    """`net` holds the server's model between rounds."""

    def __init__(self, work: serving.Workload) -> None:
        super().__init__(work)
        s = work.settings
        self.net.metrics = functools.partial(measured, self.net)
        local = functools.partial(torch.optim.SGD, momentum=s['sgd']['momentum'], weight_decay=s['sgd']['weight_decay'])
        self.model = PyTorchModel(self.net, local, torch.optim.SGD(self.net.parameters(), lr=1.0))
        self.training = NNTrainHyperParams(
            local_num_epochs=s['epochs'], local_learning_rate=s['sgd']['lr'], local_batch_size=s['batch_size']
        )
        self.cohort: list[int] = []
        users = FederatedDataset(self.user, lambda: self.cohort.pop(0))
        self.backend = SimulatedBackend(users, users, [WeightByDatapoints()])
        self.algorithm, self.rounds = FederatedAveraging(), 0
        self.versions |= {'pfl': version('pfl')}

    def user(self, client: int) -> Dataset:
        rows = self.rows[client]
        picked = rows[torch.randperm(len(rows))]  # pfl itself goes through the examples in the order they have
        return Dataset([self.x[picked], self.y[picked]], user_id=str(client))

    def round(self, ids: list[int]) -> None:
        self.cohort, self.rounds = list(ids), self.rounds + 1
        # The algorithm counts on where its last run ended, and evaluates in the first round only.
        params = NNAlgorithmParams(self.rounds, 10**9, len(ids), 0)
        self.algorithm.run(
            params, self.backend, self.model, self.training, NNEvalHyperParams(None), send_metrics_to_platform=False
        )

    def weights(self) -> dict[str, np.ndarray]:
        return self.net.weights()


def measured(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Weighted]:
    with torch.no_grad():
        return {'loss': Weighted(float(net.loss(x, y)) * len(y), len(y))}


if __name__ == '__main__':
    channel = serving.Channel()
    channel.serve(Rounds(serving.load(channel.path)))

"""Flower: its FedAvg in the Simulation Engine on Ray, with PyTorch clients, as its PyTorch quickstart does.

One `run_simulation` serves all rounds: the server app waits for the benchmark's commands and calls `FedAvg.start` for
one round each time, so that rounds can take turns with those of others and the start of Ray is not timed.
"""

import os
import time
from collections.abc import Iterable
from importlib.metadata import version

os.environ |= {'FLWR_TELEMETRY_ENABLED': '0', 'RAY_USAGE_STATS_ENABLED': '0'}  # both read when imported

import numpy as np
import serving
import torch_clients
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import MessageType
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class Chosen(FedAvg):
    """FedAvg with a cohort that is given instead of drawn."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, self.cohort, MessageType.TRAIN)


class Rounds:
    """`arrays` is the server's model between rounds."""

    def __init__(self, work: serving.Workload, grid: Grid) -> None:
        self.grid, self.net = grid, torch_clients.Net(work)
        self.arrays, self.strategy = ArrayRecord(self.net.state_dict()), Chosen(fraction_evaluate=0.0)
        while len(nodes := list(grid.get_node_ids())) < len(work.size):  # they register while this already runs
            time.sleep(0.1)
        # Which node has which client is known to the nodes alone.
        asked = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]
        answers = grid.send_and_receive(asked)
        self.nodes = {int(m.content['node']['client']): m.metadata.src_node_id for m in answers}
        self.versions = {'flwr': version('flwr'), 'ray': version('ray'), 'torch': version('torch')}

    def round(self, ids: list[int]) -> None:
        self.strategy.cohort = [self.nodes[k] for k in ids]
        self.arrays = self.strategy.start(self.grid, self.arrays, num_rounds=1).arrays

    def weights(self) -> dict[str, np.ndarray]:
        self.net.load_state_dict(self.arrays.to_torch_state_dict())
        return self.net.weights()


def client_app(path: str) -> ClientApp:
    """The clients. An actor of Ray serves many nodes, and loads the workload once."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        content = RecordDict({'node': MetricRecord({'client': int(context.node_config['partition-id'])})})
        return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        clients = torch_clients.shared(path)
        clients.net.load_state_dict(message.content['arrays'].to_torch_state_dict())
        client = int(context.node_config['partition-id'])
        clients.train(client)
        metrics = MetricRecord({'num-examples': len(clients.rows[client])})
        content = RecordDict({'arrays': ArrayRecord(clients.net.state_dict()), 'metrics': metrics})
        return Message(content, reply_to=message)

    return app


def main() -> None:
    channel = serving.Channel()
    work = serving.load(channel.path)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        channel.serve(Rounds(work, grid))

    # By default Flower gives each client two cores, which suits networks for images. With one thread for each, as small
    # networks want it, there are as many clients side by side as cores.
    threads = work.settings['threads']
    resources = {'client_resources': {'num_cpus': threads, 'num_gpus': 0.0}} if threads else None
    run_simulation(server, client_app(channel.path), len(work.size), backend_config=resources)


if __name__ == '__main__':
    main()

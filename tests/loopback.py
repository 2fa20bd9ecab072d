"""Flower in one process: a grid that calls the sites' apps itself, for tests of `fedjax_nc.flower`."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from fedjax_nc import flower
from fedjax_nc.base import FederatedData
from fedjax_nc.data import federate

SERVER = 1
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = SERVER  # without which no message can be made


def context(node: int, **config: Any) -> Context:
    """As a node would hand it to an app."""
    return Context(1, node, config, RecordDict(), {})


class Loopback(Grid):
    """Nodes 101, 102, ... run `apps` as soon as they are sent something; `change(node, message, reply)` is their fault.

    It returns the reply that goes back, or None for none at all.
    """

    def __init__(self, apps: list[ClientApp], change: Callable[[int, Message, Message], Message | None] | None = None):
        self.apps = {101 + i: app for i, app in enumerate(apps)}
        self.contexts = {node: context(node) for node in self.apps}
        self.change = change or (lambda node, message, reply: reply)
        self.numbers, self.replies = itertools.count(1), {}
        self.log: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def get_nodes(self) -> Iterable[Any]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        out = []
        for message in messages:
            name = f'm{next(self.numbers)}'
            message.metadata.__dict__['_message_id'] = name
            message.metadata.__dict__['_src_node_id'] = SERVER
            message.metadata.__dict__['_run_id'] = SERVER
            node = message.metadata.dst_node_id
            self.log.append(message)
            there = Message(travelled(message.content), reply_to=message)  # nodes must not share what they change
            there.metadata.__dict__.update(message.metadata.__dict__)
            try:
                reply = self.apps[node](there, self.contexts[node])
            except Exception as error:
                reply = Message(Error(2, repr(error)), reply_to=message)
            reply.metadata.__dict__['_src_node_id'] = node
            changed = self.change(node, message, reply)
            if changed is not None:
                self.replies[name] = changed
                self.log.append(changed)
            out.append(name)
        return out

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(name) for name in list(message_ids) if name in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def serve(app: ServerApp, grid: Grid) -> None:
    """Runs a server to its end."""
    app(grid, context(SERVER))


def travelled(content: RecordDict) -> RecordDict:
    """A copy, through the bytes that a network would carry."""
    return recorddict_from_proto(recorddict_to_proto(content))


def told(reply: Message, **changes: Any) -> Message:
    """A reply whose `told` says something else."""
    said = {**reply.content.config_records['told'], **changes}
    reply.content['told'] = ConfigRecord(said)
    return reply


def own(data: FederatedData, k: int) -> FederatedData:
    """The data of client k as that client itself would hold them."""
    rows = np.asarray(data.index[k, : int(data.size[k])])
    return federate(np.asarray(data.x)[rows], np.asarray(data.y)[rows], [np.arange(len(rows))], data.num_classes)


def agreement(phases: Sequence[flower.Phase], data: FederatedData, **settings: Any) -> flower.Agreement:
    """What sites with these clients' data agree on."""
    example = jax.ShapeDtypeStruct(data.x.shape[1:], data.x.dtype)
    return flower.Agreement(phases, jax.random.key(0), data.num_clients, example, data.num_classes, **settings)


def sites(agreed: flower.Agreement, data: FederatedData, out: Path) -> list[ClientApp]:
    """The apps of all sites."""

    def site(k: int) -> Callable[[Context], flower.Site]:
        return lambda context: flower.Site(k, own(data, k), out / f'site-{k}', own(data, k))

    return [flower.client_app(agreed, site(k)) for k in range(data.num_clients)]


class Seen(NamedTuple):
    """What a server showed after a round."""

    phase: str
    row: dict[str, float]
    server: Any


def deploy(
    agreed: flower.Agreement, grid: Loopback, out: Path, patience: flower.Patience | None = None, **options: Any
) -> list[Seen]:
    """Runs a server to its end; what it showed after each round."""
    seen: list[Seen] = []
    patience = patience or flower.Patience(5.0, None, 5.0)
    show = lambda phase, row, state: seen.append(Seen(phase, row, jax.device_get(state.server)))  # noqa: E731
    serve(flower.server_app(agreed, out, patience=patience, on_round=show, progress=False, **options), grid)
    return seen


def apart(a: Any, b: Any) -> float:
    """The largest difference between the numbers of two trees, over 1 or the largest number."""
    same = jax.tree.structure(a) == jax.tree.structure(b)
    assert same, (jax.tree.structure(a), jax.tree.structure(b))
    pairs = [(_plain(u), _plain(v)) for u, v in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return max(
        (np.max(np.abs(u - v), initial=0.0) / max(1.0, np.max(np.abs(v), initial=0.0)) for u, v in pairs), default=0.0
    )


def _plain(u: Any) -> Any:
    u = jax.random.key_data(u) if jax.numpy.issubdtype(u.dtype, jax.dtypes.prng_key) else u
    return np.asarray(u, np.float64)

"""Flower in one process: a grid that calls the sites' apps itself, for tests of `fedjax_nc.flower`."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1


def context(node: int, **config: Any) -> Context:
    """As a node would hand it to an app."""
    return Context(1, node, config, RecordDict(), {})


class Loopback(Grid):
    """Nodes 101, 102, ... run `apps` as soon as they are sent something; `change(node, message, reply)` is their fault.

    It returns the reply that goes back, or None for none at all.
    """

    def __init__(self, apps: list[ClientApp], change: Callable[[int, Message, Message], Message | None] | None = None):
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = SERVER
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

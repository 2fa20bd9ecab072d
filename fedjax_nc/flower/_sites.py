"""Who is there, and how messages are sent and taken."""

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedjax_nc import _checkpoints
from fedjax_nc.flower import _plan, _wire
from fedjax_nc.flower._plan import Agreement

POLL = 0.1  # seconds between two looks at what has come
SUPERLINK = 1  # whose replies are about nodes that cannot be reached
LATER = 600.0  # seconds at most until a node that did not is asked again


class Sites:
    """Who is there: the node of each site, and how many examples it holds, which a restarted server knows again.

    Attributes:
      node: from the number of a site to its node, of those that are there.
      sizes: [K] examples; 0 for a site that has never been there.
      first: [K], those at the beginning, which first states may depend on.
      why: from a node that takes no part to the reason.
    """

    def __init__(
        self, grid: Grid, agreed: Agreement, path: Path, nodes: Mapping[int, int] | None = None,
        largest: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.grid, self.clients, self.path, self.nodes, self.largest = grid, agreed.clients, path, nodes, largest
        self.why: dict[int, str] = {}
        self.name = _plan.fingerprint(agreed)
        self.node: dict[int, int] = {}
        self.met: set[int] = set()
        self.later: dict[int, tuple[int, float]] = {}  # how often a node did not say who it is, and when to ask again
        self.sizes, self.first = np.zeros(agreed.clients, np.int64), None
        if path.exists():
            held = json.loads(path.read_text())
            if held['agreement'] != self.name:
                raise ValueError(f'{path.parent} holds a run of another agreement: choose another directory')
            self.sizes, self.first = np.asarray(held['sizes']), np.asarray(held['first'])

    def gather(self, least: int, seconds: float, hello: float = 120.0) -> None:
        """Waits for all sites, or so long; then `least` must be there. A node has `hello` seconds to say who it is."""
        deadline, told = time.monotonic() + seconds, False
        while True:
            self.greet(min(hello, seconds))
            if self.node and len(self.node) < self.clients and not told:
                absent = ', '.join(str(k) for k in range(self.clients) if k not in self.node)
                warn(
                    f'{len(self.node)} of {self.clients} sites are there, and {absent} not: waits for them up to '
                    f'{seconds:.0f} s, which is Patience.start'
                )
                told = True
            if len(self.node) == self.clients or time.monotonic() > deadline:
                break
            time.sleep(min(0.5, seconds / 10))
        if len(self.node) < least:
            why = self.reasons(min(hello, seconds), 'hello' if hello <= seconds else 'start')
            raise RuntimeError(f'{len(self.node)} of at least {least} sites said hello within {seconds:.0f} s{why}')
        if self.first is None:
            self.first = self.sizes.copy()
        self.save()

    def save(self) -> None:
        first = self.sizes if self.first is None else self.first
        text = json.dumps({'agreement': self.name, 'sizes': self.sizes.tolist(), 'first': first.tolist()})
        _checkpoints.replace(self.path, text)

    def leave(self, client: int, why: str) -> None:
        """Goes on as if a site had never been there."""
        node = self.node.pop(client)
        self.sizes[client], self.why[node] = 0, why
        warn(f'site {client}, node {node}, takes no part: {why}')
        self.save()

    def reasons(self, seconds: float, limit: str) -> str:
        """Why nodes that are there take no part, of which some may not have answered within a limit of `Patience`."""
        told = '; '.join(f'node {node}: {why}' for node, why in sorted(self.why.items()))
        if silent := sorted(set(self.later) - set(self.why)):
            many = f'{len(silent)} nodes are' if len(silent) > 1 else 'a node is'
            told += (
                f'{"; " if told else ""}{many} there and did not answer within {seconds:g} s: raise Patience.{limit}'
            )
        return f' ({told})' if told else ': are they started?'

    def greet(self, seconds: float) -> None:
        """Forgets nodes that have gone, and asks new ones who they are."""
        there = set(self.grid.get_node_ids())
        self.node = {k: node for k, node in self.node.items() if node in there}
        self.met &= there
        self.why = {node: why for node, why in self.why.items() if node in there}
        began = time.monotonic()
        new = sorted(node for node in there - self.met if began >= self.later.get(node, (0, 0.0))[1])
        before = self.sizes.copy()
        for reply, _ in collect(self.grid, [message('query.hello', node, RecordDict()) for node in new], seconds):
            try:
                self.know(reply)
                self.why.pop(reply.metadata.src_node_id, None)
            except Exception as error:  # a site may send anything
                self.why[reply.metadata.src_node_id] = line(error)
                warn(f'node {reply.metadata.src_node_id} takes no part: {line(error)}')
        self.later = {node: until for node, until in self.later.items() if node in there - self.met}
        for node in set(new) - self.met:  # who is silent, or none of the sites, must not hold up every round
            tries, now = self.later.get(node, (0, 0.0))[0], time.monotonic()
            self.later[node] = tries + 1, now + min(max(now - began, POLL) * 2 ** min(tries, 20), LATER)
        if self.first is not None and (before != self.sizes).any():
            self.save()

    def know(self, reply: Message) -> None:
        """Takes note of who answers.

        Raises:
          WireError: for a node that is none of the sites.
        """
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise _wire.WireError(fault(reply))
        told = reply.content.config_records.get('told', ConfigRecord())
        client, size = told.get('client'), told.get('size')
        if type(client) is not int or not 0 <= client < self.clients:
            raise _wire.WireError(f'it says that it is site {str(client)[:20]} of {self.clients}')
        size = whole(size)
        if told.get('library') != _plan.library():
            self.met.add(node)
            raise _wire.WireError(
                f'site {client} has version {str(told.get("library"))[:20]} of fedjax_nc, and the server '
                f'{_plan.library()}'
            )
        versions = str(told.get('versions'))[:120]
        other = '' if versions == _plan.versions() else f' has {versions}, and the server {_plan.versions()}'
        if told.get('agreement') != self.name:
            self.met.add(node)
            raise _wire.WireError(
                f'site {client} has another agreement: another model, algorithm, key or number of rounds'
                + (other and f'; it{other}')
            )
        if self.nodes is not None and self.nodes.get(node) != client:
            raise _wire.WireError(f'it says that it is site {client}, and it is {self.nodes.get(node, "none")}')
        if self.node.get(client, node) != node:
            raise _wire.WireError(f'it says that it is site {client}, which another node is')
        if self.sizes[client] not in (0, size):
            raise _wire.WireError(
                f'site {client} began with {self.sizes[client]} examples and has {size} now: begin another run'
            )
        if self.largest is not None and size > self.largest.get(client, size):
            raise _wire.WireError(f'site {client} says {size} examples, and it has {self.largest[client]} at most')
        if other and client not in self.node:
            warn(f'results may differ in their last digits: site {client}{other}')
        self.node[client], self.sizes[client] = node, size
        self.met.add(node)


def collect(
    grid: Grid,
    messages: list[Message],
    seconds: float,
    enough: int = 1,
    rest: float | None = None,
    counts: Callable[[Message, float], bool] = lambda reply, after: not reply.has_error(),
) -> list[tuple[Message, float]]:
    """Sends messages and takes the replies that come within so many seconds, each with those after which it was there.

    Once `enough` that count are there, the others have `rest` seconds more; `counts` is asked of each as it comes. For
    a node that has gone the SuperLink itself replies: that is a warning, and nobody's reply.
    """
    if not messages:
        return []
    began, replies, fine = time.monotonic(), list[tuple[Message, float]](), 0
    waiting = set(grid.push_messages(messages))
    whom = {sent.metadata.message_id: sent.metadata.dst_node_id for sent in messages}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.metadata.src_node_id == SUPERLINK:
                warn(f'node {whom.get(reply.metadata.reply_to_message_id, "?")} cannot be reached: {fault(reply)}')
                continue
            replies.append((reply, time.monotonic() - began))
            fine += counts(*replies[-1])
            if fine == enough and rest is not None:
                deadline = min(deadline, time.monotonic() + rest)
        if waiting:
            time.sleep(POLL)
    return replies


class Quick:
    """A grid on which Flower's own protocols need not wait three seconds between two looks."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        return [
            reply for reply, _ in collect(self.grid, messages, 3600.0 if timeout is None else timeout, len(messages))
        ]


def whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise _wire.WireError(f'{str(value)[:20]} is no number of examples')
    return value


def message(kind: str, node: int, content: RecordDict, group: str = '') -> Message:
    return Message(content, dst_node_id=node, message_type=kind, group_id=group)


def size(content: RecordDict) -> int:
    """Of the arrays in a message."""
    return sum(len(a.data) for record in content.array_records.values() for a in record.values())


def fault(reply: Message) -> str:
    return line(reply.error.reason or f'error {reply.error.code}')


def line(text: Any) -> str:
    """The end of a text on one line, without what could steer a terminal."""
    return ''.join(c for c in ' '.join(str(text)[-2000:].split())[-300:] if c.isprintable())


def warn(text: str) -> None:
    """A warning that does not end the run where filters make errors of warnings: sites are its cause."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        logging.getLogger(__name__).warning(text)

"""A round of the server: whom it asks, what it accepts of what comes back, and the step that simulation takes."""

import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from fedjax_nc import _differences, _keys, checks, simulate, tree
from fedjax_nc._checkpoints import Row
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.base import Aggregate, Array, Info, Shard, State, Tree
from fedjax_nc.flower import _plan, _secure, _sites, _wire
from fedjax_nc.flower._plan import Agreement, Phase

TESTED = 'tested', 'accuracy', 'personal_accuracy'
"""What rows say of the tests of sites."""


class Patience(NamedTuple):
    """How long a server waits, in seconds."""

    round: float = 600.0  #: for the sites of a round
    #: for the others, once `least` sites have answered; None: as long as `round`. With `Agreement.secure` all have
    #: `round` for each of four messages
    rest: float | None = None
    start: float = 3600.0  #: for all sites at the beginning, and for `least` of them later; several times `round`
    hello: float = 120.0  #: for a new node to load its data and say who it is


class Asking(NamedTuple):
    """What a server asks its sites in a round."""

    number: int  #: of the phase
    round: int  #: 1 is the first
    key: Array  #: of the round
    server: Tree  #: state
    begun: list[Tree]  #: of each phase so far, what its sites' first states are made of
    counted: list[np.ndarray]  #: of each phase so far, [K] the last round in which a site's message counted


class Reply(NamedTuple):
    """What a site sent, checked."""

    message: Tree
    info: Info


class Answers(NamedTuple):
    """What came of a round."""

    ids: np.ndarray  #: [M], the cohort as it was drawn
    there: list[int]  #: whose messages count
    replies: dict[int, Reply]  #: where they can be seen
    summed: Tree  #: where they cannot
    told: Row
    each: Mapping[str, Any]  #: what `sites.jsonl` says of each
    missing: str = ''  #: why the round cannot count


class Server:
    """What a server has at hand; its methods change nothing but `sites`."""

    def __init__(
        self, grid: Grid, context: Context, agreed: Agreement, kinds: list[_plan.Shapes], sites: _sites.Sites,
        patience: Patience, least: int, most: float,
    ) -> None:  # fmt: skip
        self.grid, self.context, self.agreed, self.kinds, self.sites = grid, context, agreed, kinds, sites
        self.patience, self.least, self.most = patience, least, most
        self.name = sites.name
        self.judged: dict[tuple[int, int], bool] = {}  # whether a site of this size changes the first state

    def admit(self) -> None:
        """Leaves out sites that come after the beginning where a first state of a phase depends on who is there then.

        SCAFFOLD's holds the number of clients, for one: simulation would have counted them.
        """
        first = self.sites.first
        assert first is not None
        for k in [k for k in self.sites.node if self.agreed.secure and not self.sites.sizes[k]]:
            self.sites.leave(k, 'it has no examples, and a sum of few sites would show what the others sent')
        for k in [k for k in self.sites.node if self.sites.sizes[k] and not first[k]]:
            size = int(self.sites.sizes[k])
            if (k, size) not in self.judged:
                later = np.where(np.arange(len(first)) == k, size, first)
                one, other = ([self._first(q, sizes) for q in range(len(self.kinds))] for sizes in (first, later))
                self.judged[k, size] = bool(_differences.changed(one, other, 0.0))
            if self.judged[k, size]:
                self.sites.leave(
                    k,
                    'it was not there at the beginning, on which the first state of this method depends: begin another '
                    'run with all sites, and wait longer for them with Patience.start',
                )

    def _first(self, number: int, sizes: np.ndarray, before: Tree = None, kept: int = 0) -> Tree:
        """The server's first state of a phase with sites of these sizes, after `before`, or zeros, having `kept`."""
        phase, data = self.agreed.phases[number], _plan.blank(self.agreed, sizes)
        if number == 0:
            return simulate.init(phase.algorithm, self.agreed.init_key, data).server
        last, clients = self.kinds[number - 1], self.agreed.clients
        if before is None:
            before = jax.tree.map(lambda u: _zeros(u.shape, u), last.server)
        everybody = jax.tree.map(lambda u: _zeros((clients, *u.shape), u), last.client)
        everybody = jax.tree.map(lambda u: u + kept if jnp.issubdtype(u.dtype, jnp.number) else u, everybody)
        return phase.enter(phase.algorithm, phase.key, State(before, everybody), data).server

    def begin(self, number: int, before: Tree) -> tuple[Tree, Tree]:
        """The server's first state of a phase, and what its sites' first states are made of.

        Raises:
          ValueError: if it depends on what sites keep, which the server does not see.
        """
        assert self.sites.first is not None
        if number == 0:
            state = self._first(0, self.sites.first)
            return state, state
        state, other = (self._first(number, self.sites.first, before, kept) for kept in (0, 1))
        if _differences.changed(state, other, 0.0):
            raise ValueError(
                f'the phase {self.agreed.phases[number].name} begins with what sites keep to themselves, which the '
                'server never sees: its `enter` cannot be deployed'
            )
        return state, before

    def unseen(self, number: int) -> bool:
        """Whether the messages of a phase are summed unseen; there may be none."""
        return self.agreed.secure is not None and bool(jax.tree.leaves(self.kinds[number].message))

    def step(self, number: int) -> Callable[[Array, Tree, Answers], tuple[Tree, Row, bool]]:
        """The end of a round: (key, state, answers) -> (state, its loss, whether it is finite)."""
        phase, agreed = self.agreed.phases[number], self.agreed
        seen, unseen = seen_step(phase), unseen_step(phase)

        def step(key: Array, state: Tree, answers: Answers) -> tuple[Tree, Row, bool]:
            own = own_key(key, phase.algorithm.secret)
            data = _plan.blank(agreed, self.sites.sizes)
            present = np.where(np.isin(answers.ids, answers.there), answers.ids, agreed.clients).astype(np.int32)
            if answers.summed is not None:
                new = unseen(own, state, data, jnp.asarray(present), answers.summed)
                return new, {}, bool(tree.finite(new))
            rows = stacked([answers.replies.get(int(k)) for k in answers.ids], self.kinds[number])
            new, report = seen(key, own, state, data, jnp.asarray(present), rows)
            return new, {} if agreed.secure else {'loss': float(report.loss)}, bool(report.finite)

        return step

    def ask(self, asking: Asking) -> Answers:
        """Asks the cohort for a round."""
        phase = self.agreed.phases[asking.number]
        ids = np.asarray(simulate.choose(simulate.cohort_key(asking.key), self.agreed.clients, phase.cohort))
        node = {int(k): self.sites.node[int(k)] for k in sorted(ids) if int(k) in self.sites.node}
        contents = self.contents(asking, node, _wire.pack(jax.random.split(asking.key, 3)[1]))
        sent = {k: _sites.size(contents[k]) for k in node}
        told: Row = {'sites': 0, 'asked': len(ids), 'refused': 0, 'bytes_up': 0, 'bytes_down': sum(sent.values())}
        if self.unseen(asking.number):
            return self.ask_unseen(asking, ids, node, contents, told, sent)
        messages = [
            _sites.message('train.round', node[k], contents[k], f'{asking.number}-{asking.round}') for k in node
        ]
        whose, replies = {n: k for k, n in node.items()}, {}
        faults, took, up = list[str](), dict[int, float](), dict[int, int]()

        def counts(reply: Message, after: float) -> bool:
            k = whose.get(reply.metadata.src_node_id)
            try:
                if k is None or k in replies:
                    raise _wire.WireError(f'node {reply.metadata.src_node_id} was not asked')
                replies[k] = self.read(reply, asking, k)
                took[k], up[k] = round(after, 3), _sites.size(reply.content)
            except Exception as error:  # a site may send anything, and must not end the run
                faults.append(_sites.line(error))
                _sites.warn(f'round {asking.round}: {faults[-1]}; the round goes on without it')
                return False
            return bool(self.sites.sizes[k])

        _sites.collect(self.grid, messages, self.patience.round, self.least, self.patience.rest, counts)
        told |= {'sites': len(replies), 'refused': len(faults), 'bytes_up': sum(up.values())}
        holding = sum(self.sites.sizes[k] > 0 for k in replies)
        enough = f'{holding} of at least {self.least} sites answered' if holding < self.least else ''
        if enough and (away := sorted(set(ids.tolist()) - set(replies))):
            enough += f' and not {checks.shown(away)}; where one is gone for good, go on with a lower `least`'
        if enough and faults:
            enough += f', and {len(faults)} were refused, the first of them because {faults[0]}'
            if len(faults) == len(messages) > 1 and all(' goes to ' in fault for fault in faults):
                enough += (
                    '. A message of an earlier round may have spoilt the model: go back to a copy of the run, with a '
                    'lower `most`'
                )
        each = {'refused': faults, 'bytes_up': up, 'bytes_down': sent, 'seconds': took}
        return Answers(ids, sorted(replies), replies, None, told, each, enough)

    def ask_unseen(
        self, asking: Asking, ids: np.ndarray, node: dict[int, int], contents: dict[int, RecordDict], told: Row,
        sent: dict[int, int],
    ) -> Answers:  # fmt: skip
        """The same, of which the sum is all that is seen."""
        secure, kinds = self.agreed.secure, self.kinds[asking.number].message
        assert secure is not None
        largest = int(self.sites.sizes.max())
        for content in contents.values():
            content['secure'] = ConfigRecord({'largest': largest})
        entries, faults = _secure.length(self.agreed, asking.number, kinds), list[str]()

        def refused(fault: str) -> None:
            faults.append(_sites.line(fault))
            _sites.warn(f'round {asking.round}: {faults[-1]}; the sum is made without it')

        try:
            vector, stayed = _secure.summed(
                cast(Grid, _sites.Quick(self.grid)), self.context, {node[k]: contents[k] for k in node}, secure,
                asking.round, entries, self.patience.round, refused,
                max(self.least, _secure.threshold(secure, len(ids))),
            )  # fmt: skip
        except _wire.WireError as error:
            return Answers(ids, [], {}, None, told, {}, _sites.line(error))
        there = sorted(k for k, n in node.items() if n in stayed)
        up = dict.fromkeys(there, _secure.size(entries))
        told |= {'sites': len(there), 'refused': len(faults), 'bytes_up': sum(up.values())}
        each = {'refused': faults, 'bytes_up': up, 'bytes_down': sent}
        return Answers(ids, there, {}, _secure.unpacked(self.agreed, asking.number, vector, kinds, largest), told, each)

    def contents(self, asking: Asking, node: dict[int, int], keys: Any) -> dict[int, RecordDict]:
        """What each site is sent."""
        state = _wire.pack(asking.server, half=self.agreed.half)
        begun: dict[int, Any] = {}  # packed where a site needs it
        out = {}
        for k in node:
            accepted = [int(rounds[k]) for rounds in asking.counted]
            last = max((q for q, t in enumerate(accepted) if t), default=-1)
            ask: dict[str, Any] = {
                'phase': asking.number, 'round': asking.round, 'accepted': accepted,
                'library': _plan.library(), 'agreement': self.name,
            }  # fmt: skip
            missed: dict[str, Any] = {}
            for q in range(last + 1, asking.number + 1):
                begun[q] = missed[f'begin-{q}'] = begun.get(q) or _wire.pack(asking.begun[q])
            out[k] = RecordDict({'ask': ConfigRecord(ask), 'server': state, 'key': keys, **missed})
        return out

    def read(self, reply: Message, asking: Asking, k: int) -> Reply:
        """What a site sent, checked.

        Raises:
          WireError: if it is not what it was asked for.
        """
        who, kinds = f'site {k}', self.kinds[asking.number]
        if reply.has_error():
            raise _wire.WireError(f'{who} answers with an error: {_sites.fault(reply)}')
        told = reply.content.config_records.get('told', ConfigRecord())
        if (told.get('client'), told.get('phase'), told.get('round')) != (k, asking.number, asking.round):
            raise _wire.WireError(f'{who} answers another question')
        message, info = (reply.content.array_records.get(name, ArrayRecord()) for name in ('message', 'info'))
        found = Reply(_wire.unpack(message, kinds.message, who, most=self.most), _wire.unpack(info, kinds.info, who))
        if any(np.min(count, initial=0) < 0 for count in jax.tree.leaves(found.info[1:])):
            raise _wire.WireError(f'{who} counts less than nothing')
        size = self.sites.sizes[k]
        for rows in jax.tree.leaves(found.message, is_leaf=lambda u: isinstance(u, ClassRows)):
            if not isinstance(rows, ClassRows):
                continue
            most = max(size, math.e * min(size, len(rows.weight)))  # FedNH weighs a class it holds by exp(cosine), too
            if not (np.min(rows.weight) >= 0 and np.sum(rows.weight) <= most * (1 + 1e-6)):
                raise _wire.WireError(f'{who} weighs its classes by other numbers than its {size} examples allow')
        return found

    def tested(self, asking: Asking) -> Row:
        """What sites find on tests of their own."""
        node = self.sites.node
        contents = self.contents(asking, node, _wire.pack(asking.key))
        messages = [_sites.message('evaluate', n, contents[k]) for k, n in sorted(node.items())]
        found, whose = np.zeros(4, np.int64), set(node.values())
        for reply, _ in _sites.collect(self.grid, messages, self.patience.round, self.least, self.patience.rest):
            try:
                if reply.metadata.src_node_id not in whose:
                    raise _wire.WireError('it was not asked, or has answered')
                whose.remove(reply.metadata.src_node_id)
                if reply.has_error():
                    raise _wire.WireError(_sites.fault(reply))
                told = reply.content.config_records.get('told', ConfigRecord())
                examples, right, own, personal = (
                    _sites.whole(told.get(name))
                    for name in ('examples', 'right', 'examples_personal', 'right_personal')
                )
                if max(right, own) > examples or personal > own:
                    raise _wire.WireError(f'it has more right answers than {examples} examples')
                found += (examples, right, own, personal)
            except Exception as error:  # as above
                _sites.warn(f'the tests of node {reply.metadata.src_node_id} do not count: {_sites.line(error)}')
        examples, right, own, personal = found.tolist()
        if not examples:
            return {}
        row: Row = {'tested': examples}
        if self.kinds[asking.number].generic:
            row['accuracy'] = right / examples
        if own and jax.tree.leaves(self.kinds[asking.number].client):
            row['personal_accuracy'] = personal / own
        return row


def own_key(key: Array, secret: bool) -> Array:
    """What the server draws from in a round: as in simulation, or, if sites must not know it, what nothing tells.

    Sites know the agreement's keys, and every state. Fresh randomness is kept nowhere, so that a round that is done
    again does not show another sum of messages with the same noise.
    """
    if not secret:
        return jax.random.split(key, 3)[2]
    bare = jax.random.key_data(key)
    drawn = jnp.asarray(np.frombuffer(secrets.token_bytes(bare.nbytes), bare.dtype).reshape(bare.shape))
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(drawn, impl=jax.random.key_impl(key)) if typed else drawn


def seen_step(phase: Phase) -> Callable[..., tuple[Tree, simulate.Report]]:
    """The end of a round by the code of simulation, whose clients here are what sites have sent.

    Returns:
      `(key, own, server, data, ids [M], replies [M, ...]) -> (server, report)`, compiled. The server draws from `own`;
      `data` are those of `_plan.blank`; `ids` hold K for those who sent nothing, whose rows are ignored.
    """

    def client(key: Array, server: Tree, held: Reply, shard: Shard) -> tuple[Tree, Tree, Info]:
        return held, held.message, held.info

    @jax.jit
    def step(
        key: Array, own: Array, server: Tree, data: Any, ids: Array, replies: Reply
    ) -> tuple[Tree, simulate.Report]:
        def end(key: Array, server: Tree, aggregate: Aggregate) -> Tree:
            return phase.algorithm.server(own, server, aggregate)

        # One after the other, so that the order of the sum is the same on every machine.
        work = simulate.make_work(phase.algorithm._replace(client=client, server=end), chunk=1)
        server, _, report = work(key, server, replies, data, ids, jnp.arange(len(ids)))
        return server, report._replace(info=())

    return step


def unseen_step(phase: Phase) -> Callable[..., Tree]:
    """The same from a sum of messages: `(own, server, data, ids [M], summed) -> server`, compiled."""

    @jax.jit
    def step(own: Array, server: Tree, data: Any, ids: Array, summed: Tree) -> Tree:
        weights = data.size.at[ids].get(mode='fill', fill_value=0).astype(jnp.float32)
        value = phase.algorithm.aggregate.finish(summed)
        aggregate = Aggregate(value, jnp.sum(weights), jnp.sum(jnp.sign(weights)), len(ids))
        return phase.algorithm.server(own, server, aggregate)

    return step


def stacked(replies: list[Reply | None], kinds: _plan.Shapes) -> Reply:
    """Replies with a leading axis; zeros for those who sent none."""
    nothing = jax.tree.map(lambda u: _zeros(u.shape, u), Reply(kinds.message, kinds.info))
    return jax.tree.map(lambda *u: jnp.stack(u), *[nothing if r is None else r for r in replies])


def _zeros(shape: tuple[int, ...], like: Any) -> Array:
    if _keys.keyed(like):
        bare = jax.eval_shape(_keys.plain, jax.ShapeDtypeStruct(shape, like.dtype))
        return _keys.again(jnp.zeros(bare.shape, bare.dtype), like)
    return jnp.zeros(shape, like.dtype)

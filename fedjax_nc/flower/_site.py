"""One site: its data, its state, and the Flower client that works on them when the server asks."""

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import save as packed

from fedjax_nc import _keys, checks, evaluate, saving, tree
from fedjax_nc._checkpoints import append, replace
from fedjax_nc._fingerprint import of_arrays
from fedjax_nc.base import Algorithm, FederatedData, Info, State, Tree
from fedjax_nc.flower import _plan, _secure, _sites, _wire
from fedjax_nc.flower._plan import Agreement


class Site(NamedTuple):
    """What a site has, and nobody else sees."""

    client: int  #: its number, 0 to K - 1
    data: FederatedData  #: its training examples, as the one client of a pool of its own
    folder: Path  #: where its state is kept between rounds and restarts, with a record of what it has sent
    test: FederatedData | None = None  #: its test examples, alike


class Ask(NamedTuple):
    """What a server asks for."""

    phase: int  #: 0 is the first
    round: int  #: 1 is the first
    accepted: list[int]  #: for this phase and those before, the last round in which the site's message counted; 0: none

    @classmethod
    def of(cls, content: RecordDict, agreed: Agreement, name: str) -> 'Ask':
        """Reads it from a message to a site of the agreement with that fingerprint.

        Raises:
          WireError: for what no server of this agreement asks, or another version of the library.
        """
        ask = content.get('ask')
        if not isinstance(ask, ConfigRecord):
            raise _wire.WireError('the server must say what it asks for')
        if ask.get('library') != _plan.library():
            raise _wire.WireError(
                f'the server has version {str(ask.get("library"))[:20]} of fedjax_nc, and this site '
                f'{_plan.library()}: install the same'
            )
        if ask.get('agreement') != name:
            raise _wire.WireError(
                'the server runs another agreement than this site: models, algorithms, keys and numbers of phases must '
                'be the same program'
            )
        phase, round = ask.get('phase'), ask.get('round')
        accepted: Any = ask.get('accepted')
        if not (type(phase) is int and 0 <= phase < len(agreed.phases)):
            raise _wire.WireError(f'the server asks for phase {str(phase)[:20]}, and there are {len(agreed.phases)}')
        if not (type(round) is int and 1 <= round <= agreed.phases[phase].rounds + 1):
            raise _wire.WireError(f'the server asks for round {str(round)[:20]} of {agreed.phases[phase].rounds}')
        known = isinstance(accepted, list) and len(accepted) == phase + 1 and all(type(t) is int for t in accepted)
        if not (known and all(0 <= t < 2**31 for t in accepted) and accepted[-1] < round):
            raise _wire.WireError(f'the server must tell {phase + 1} rounds that counted, not {str(accepted)[:40]}')
        return cls(phase, round, accepted)


def client_app(agreed: Agreement, site: Callable[[Context], Site]) -> ClientApp:
    """The Flower client of a site: one client of the agreement's algorithms.

    It answers `query.hello` with its number and the number of its examples, `train.round` with a message of the
    algorithm, and `evaluate` with how many of its tests are right. With `agreed.secure` a message goes masked, by
    Flower's `secaggplus_mod`, and never otherwise. The state is written before a message is sent, and taken up again
    only if the server says that this message counted, so that neither side can lose a round of the other. After the
    last round of a phase the site writes `NUMBER-NAME.safetensors` for `saving.load`: its own model, or the generic one
    where clients keep nothing. `sent.jsonl` in its folder has a line for each message, written before it is sent: when,
    of which `kind` ('hello', 'round' or 'tests'), phase and round, and what it tells: examples, right answers, bytes,
    loss, and whether the message was `masked`.

    Args:
      agreed: what all have in common.
      site: from Flower's context, such as `context.node_config`, to the site; called once a process.

    Returns:
      The app, for `[tool.flwr.app.components]`.

    Raises:
      ValueError: for an agreement that cannot be carried out. The app refuses a site whose data are of another kind,
        and answers with an error what no server of this agreement asks; see `WireError`.
    """
    kinds, name = _plan.checked(agreed), _plan.fingerprint(agreed)
    works = [jax.jit(phase.algorithm.client) for phase in agreed.phases]
    tables = [_tables(phase.algorithm, kind.generic) for phase, kind in zip(agreed.phases, kinds, strict=True)]
    known: list[Site] = []

    def here(context: Context) -> Site:
        if not known:
            found = site(context)
            fits(found, agreed)
            found.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # personal models are for the site alone
            known.append(found)
        return known[0]

    def asked(message: Message, mine: Site) -> tuple[Ask, Tree, Tree]:
        """What is asked for, with the server's state and the site's own."""
        ask = Ask.of(message.content, agreed, name)
        told, size = mine.folder / f'{name}.size', int(mine.data.size[0])
        if told.exists() and told.read_text() != str(size):
            raise _wire.WireError(
                f'site {mine.client} told the server {told.read_text()[:20]} examples and has {size} now: a run '
                'goes on with the data that it began with'
            )
        server = _wire.unpack(_record(message, 'server'), kinds[ask.phase].server, 'the server')
        return ask, server, before(mine, ask, message)

    def work(message: Message, mine: Site) -> tuple[Ask, Tree, Info]:
        """A client's whole work of a round, whose state is on disk afterwards."""
        ask, server, own = asked(message, mine)
        if ask.round > agreed.phases[ask.phase].rounds:
            raise _wire.WireError(f'the server asks for more than {agreed.phases[ask.phase].rounds} rounds')
        key = jax.random.fold_in(_wire.unpack(_record(message, 'key'), agreed.init_key, 'the server'), mine.client)
        own, sent, info = works[ask.phase](key, server, own, mine.data.shard(0))
        keep(mine, name, ask, own)
        return ask, sent, info

    app = ClientApp(mods=[_discreet])

    @app.query('hello')
    def hello(message: Message, context: Context) -> Message:
        mine = here(context)
        replace(mine.folder / f'{name}.size', str(int(mine.data.size[0])))
        told: dict[str, Any] = {
            'client': mine.client,
            'size': int(mine.data.size[0]),
            'library': _plan.library(),
            'versions': _plan.versions(),
            'agreement': name,
        }
        note(mine, 'hello', examples=told['size'])
        return Message(RecordDict({'told': ConfigRecord(told)}), reply_to=message)

    @app.train('round')
    def train(message: Message, context: Context) -> Message:
        mine, began = here(context), time.monotonic()
        ask = Ask.of(message.content, agreed, name)
        if agreed.secure and jax.tree.leaves(kinds[ask.phase].message):
            raise _wire.WireError(
                'the agreement is that messages are summed unseen, and the server asks for one openly'
            )
        ask, sent, info = work(message, mine)
        if agreed.secure:  # what no message goes with is not to tell more than sums do
            info = tree.zeros(info)
        told = ConfigRecord({'client': mine.client, 'phase': ask.phase, 'round': ask.round})
        content = RecordDict({'message': _wire.pack(sent, half=agreed.half), 'info': _wire.pack(info)})
        content['told'] = told
        loss = {} if agreed.secure else {'loss': float(info.loss)}
        note(mine, 'round', ask, bytes=_sites.size(content), seconds=time.monotonic() - began, masked=False, **loss)
        return Message(content, reply_to=message)

    if (secure := agreed.secure) is not None:

        @app.train(mods=_secure.mods(secure))
        def masked(message: Message, context: Context) -> Message:
            mine, began = here(context), time.monotonic()
            size, largest = int(mine.data.size[0]), _secure.largest(message)
            if largest < size:
                raise _wire.WireError('the server says that the largest site is smaller than this one')
            ask, sent, _ = work(message, mine)
            vector = _secure.vector(agreed, ask.phase, sent, size, largest)
            note(mine, 'round', ask, bytes=_secure.size(len(vector)), seconds=time.monotonic() - began, masked=True)
            return Message(_secure.answer(vector, secure), reply_to=message)

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        mine = here(context)
        ask, server, own = asked(message, mine)
        phase = agreed.phases[ask.phase]
        if ask.round > phase.rounds:
            path = mine.folder / f'{ask.phase}-{phase.name}.safetensors'
            state = State(server, jax.tree.map(lambda u: u[None], own))
            client = 0 if jax.tree.leaves(own) else None
            about = {'site': mine.client, 'last_round': ask.accepted[-1], 'rounds': phase.rounds}
            saving.save(path, phase.algorithm, state, mine.data, client=client, about=about)
            if client == 0 and not ask.accepted[-1]:
                _sites.warn(f'no round of {phase.name} counted with this site: its own model is the one it began with')
        told: dict[str, Any] = {'client': mine.client, 'examples': 0, 'right': 0}
        told |= {'examples_personal': 0, 'right_personal': 0}
        if mine.test is not None:
            found = np.asarray(tables[ask.phase](server, own, mine.test.shard(0)))
            right, personal = (int(np.trace(table)) for table in found)
            told |= {'examples': int(found[0].sum()), 'right': right}
            if ask.accepted[-1]:  # else its own model is the one that it began the phase with
                told |= {'examples_personal': told['examples'], 'right_personal': personal}
        note(mine, 'tests', ask, **{name: value for name, value in told.items() if name != 'client'})
        return Message(RecordDict({'told': ConfigRecord(told)}), reply_to=message)

    def before(mine: Site, ask: Ask, message: Message) -> Tree:
        """The site's state before the round: that of its last message that counted, taken through what followed."""
        last = max((q for q, t in enumerate(ask.accepted) if t), default=None)
        try:
            own = None if last is None else restore(mine, name, last, ask.accepted[last], kinds[last].client)
        except (FileNotFoundError, ValueError) as error:  # in words of our own
            raise _wire.WireError(str(error)) from error
        for q in range(0 if last is None else last + 1, ask.phase + 1):
            begin = _wire.unpack(_record(message, f'begin-{q}'), kinds[max(q - 1, 0)].server, 'the server')
            own = _plan.first(agreed, q, begin, own, mine.client)
        return own

    return app


def _discreet(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Tells the server of a fault in the site's own program no more than its kind: its text may hold data or paths.

    Flower sends the text of an exception to the server, and logs the whole of it at the site.
    """
    try:
        return call_next(message, context)
    except _wire.WireError:
        raise
    except Exception as error:
        raise _wire.WireError(f'the site fails with {type(error).__name__}, of which its own log tells more') from error


def _record(message: Message, name: str) -> Any:
    found = message.content.array_records.get(name)
    if found is None:
        raise _wire.WireError(f'the server did not send {name}')
    return found


def _tables(algorithm: Algorithm, generic: bool) -> Callable[..., Any]:
    """Confusion counts [2, C, C] of the generic model, if there is one, and of the site's own."""

    def both(server: Tree, own: Tree, shard: Any) -> Any:
        personal = evaluate.confusion(lambda x: algorithm.predict(server, own, x), shard)
        all_alike = evaluate.confusion(lambda x: algorithm.predict(server, None, x), shard) if generic else personal
        return jnp.stack([all_alike, personal])

    return jax.jit(both)


def fits(site: Site, agreed: Agreement) -> None:
    """Refuses data that are not of the kind that was agreed on; of shapes and types the server is told, too."""
    checks.kind('site', site, Site)
    checks.whole('client', site.client, 0)
    if site.client >= agreed.clients:
        raise ValueError(f'client must be one of 0 to {agreed.clients - 1}, not {site.client}')
    for what, data in (('data', site.data), ('test', site.test)):
        if data is None:
            continue
        checks.kind(what, data, FederatedData)
        if data.num_clients != 1 or data.num_classes != agreed.num_classes:
            raise _wire.WireError(
                f'site {site.client}: {what} must be one client with {agreed.num_classes} classes, not '
                f'{data.num_clients} with {data.num_classes}: data.federate(x, y, [rows], '
                f'num_classes={agreed.num_classes})'
            )
        shape, dtype = tuple(data.x.shape[1:]), data.x.dtype
        if shape != tuple(agreed.example.shape) or dtype != agreed.example.dtype:
            raise _wire.WireError(
                f'site {site.client}: {what} has examples {dtype}{list(shape)}, and agreed are '
                f'{agreed.example.dtype}{list(agreed.example.shape)}'
            )


def note(site: Site, kind: str, ask: Ask | None = None, **told: Any) -> None:
    """Adds a line to the site's own record of what it has told the server, before it is sent."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    where = {} if ask is None else {'phase': ask.phase, 'round': ask.round}
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in told.items()}
    append(site.folder / 'sent.jsonl', json.dumps({'time': when, 'kind': kind, **where, **rounded}))


def _place(site: Site, phase: int, round: int) -> Path:
    return site.folder / f'{phase}-{round:06d}.state'


def keep(site: Site, name: str, ask: Ask, state: Tree) -> None:
    """Writes the state after a round, whole or not at all, and drops those that nobody can ask for again.

    A server that lost its newest checkpoint goes back by one round, so that the last one but one is kept, too.
    """
    if not jax.tree.leaves(state):
        return
    arrays = {path: np.asarray(u, order='C') for path, u in tree.by_path(_keys.plain(state)).items()}
    about = {'agreement': name, 'client': str(site.client), 'checksum': of_arrays(arrays)}
    replace(_place(site, ask.phase, ask.round), packed(arrays, metadata=about), durable=True)
    there = sorted(int(path.stem.split('-')[1]) for path in site.folder.glob(f'{ask.phase}-*.state'))
    counted = ask.accepted[-1]
    needed = {ask.round, counted, *[t for t in there if t < counted][-1:]}
    for t in there:
        if t < ask.round and t not in needed:  # an answer to an old question must not drop what came after it
            _place(site, ask.phase, t).unlink(missing_ok=True)


def restore(site: Site, name: str, phase: int, round: int, like: Tree) -> Tree:
    """The state after a round.

    Raises:
      FileNotFoundError: if it is not there.
      ValueError: if it is damaged, or of another agreement or site.
    """
    if not jax.tree.leaves(like):
        return like
    path = _place(site, phase, round)
    if not path.exists():
        raise FileNotFoundError(
            f'{path.name} is not in the folder of site {site.client}, which the server counts on: bring it back'
        )
    try:
        with safetensors.safe_open(path, 'np') as file:
            about, found = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f'{path.name} of site {site.client} is damaged: {error}') from error
    if about.pop('checksum', None) not in (None, of_arrays(found)):
        raise ValueError(f'{path.name} of site {site.client} is damaged: its numbers are not those that were written')
    if about != {'agreement': name, 'client': str(site.client)}:
        raise ValueError(f'{path.name} belongs to another agreement or site than {site.client}: use a folder for each')
    wanted = tree.by_path(jax.eval_shape(_keys.plain, like))
    if {k: (u.shape, u.dtype) for k, u in found.items()} != {k: (u.shape, u.dtype) for k, u in wanted.items()}:
        raise ValueError(f'{path.name} of site {site.client} does not hold a state of phase {phase}')
    leaves = [_keys.again(found[k], leaf) for k, leaf in zip(wanted, jax.tree.leaves(like), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

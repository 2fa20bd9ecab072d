"""What every algorithm must do, whatever it is, to be called in one line by those who write one.

    testing.check(mine.algorithm(task, local.sgd(0.05), plan=local.Plan(16, 2)))

The engine promises its users that results do not depend on how a round is computed: side by side or one by one, with
what padding, in what company, in one go or resumed. An algorithm can break each of these promises. `CLAUSES` has a
function for each, which looks at two rounds that are compiled once for all of them, a `Play`, and returns what it saw
and what to do about it in one line, or '' where the promise is kept; a stage is an algorithm, too.
"""

import re
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import _checkpoints, checks, simulate
from fedjax_nc._differences import changed, described, in_one_line, plain, restructured, unsound
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, State, Tree, Variables
from fedjax_nc.data.federated import federate
from fedjax_nc.data.host import here
from fedjax_nc.data.synthetic import clusters

_SIZES = (100, 7, 60, 33, 200, 1, 50, 149)
_MEMBERS = 5  # an odd number, so that chunks of two are filled up by nobody
_ADDRESS = re.compile(' at 0x[0-9a-f]+')


class ContractError(AssertionError):
    """An algorithm breaks clauses of the contract; the message has a line for each."""


def clients(sizes: Collection[int] = _SIZES, classes: int = 5, dim: int = 12, *, seed: int = 0) -> FederatedData:
    """Clients of very unequal size on Gaussian clusters, most without some class: what `check` uses.

    Args:
      sizes: examples of each client.
      classes: their number C.
      dim: length of an example, float32.
      seed: draws the examples.

    Returns:
      K clients, one for each size; x [P, dim] float32.

    Raises:
      ValueError: if a number is not of its kind.
    """
    for size in sizes:
        checks.whole('sizes', size, 0)
    x, y = clusters(seed, sum(sizes), classes, dim)
    order = np.argsort(y + np.random.default_rng(seed).normal(size=len(y)) * 0.5, kind='stable')
    return federate(x, y, np.split(order, np.cumsum(list(sizes))[:-1]), classes)


class Play:
    """Two rounds of an algorithm, compiled once, and what the clauses of the contract must know to judge them.

    Arguments and errors (ValueError) are those of `check`; `chunk` is how many clients run side by side.

    Attributes:
      before: the state before the first round.
      state: after the second.
      report: of the second.
      traces: how often the round has been traced.
      cohort: the clients that took part, in no order of their sizes.
      absent: the others.
      keys: of the two rounds.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        *,
        state: State | None = None,
        chunk: int = 2,
        generic: bool = True,
        moves_fixed: bool | Collection[str] = False,
        atol: float = 5e-5,
        seed: int = 7,
    ) -> None:
        """Plays two rounds."""
        checks.kind('algorithm', algorithm, Algorithm)
        checks.kind('data', data, FederatedData)
        checks.number('atol', atol)
        sizes = np.asarray(data.size)
        held = np.flatnonzero(sizes)
        if len(held) <= _MEMBERS or len(set(sizes.tolist())) < 2:
            raise ValueError(f'data must have more than {_MEMBERS} clients with examples, not all of one size')
        self.algorithm, self.data, self.chunk, self.generic, self.atol = algorithm, data, chunk, generic, atol
        self.moves_fixed = moves_fixed if isinstance(moves_fixed, bool) else tuple(moves_fixed)
        self.by_size = held[np.argsort(sizes[held], kind='stable')]
        rows = np.linspace(0, len(held) - 1, _MEMBERS).round().astype(int)[[3, 1, 0, 4, 2]]
        self.cohort = jnp.asarray(self.by_size[rows], jnp.int32)
        self.absent = np.setdiff1d(np.arange(len(sizes)), np.asarray(self.cohort))
        self.key = checks.seeded(seed)
        self.keys = jax.vmap(lambda t: jax.random.fold_in(self.key, t))(jnp.arange(2))
        self.before = simulate.init(algorithm, self.key, data) if state is None else state
        self.traces = 0
        inner = simulate.make_round(algorithm, chunk=chunk)

        def counted(*args: Any) -> Any:
            self.traces += 1
            return inner(*args)

        self.round = jax.jit(counted)
        self.state, self.report = self.rounds(data)

    def rounds(self, data: FederatedData, ids: Array | None = None, keys: Array | None = None) -> tuple[State, Any]:
        """The same two rounds on other `data`, by other clients, `ids`, or with other `keys`: state and last report."""
        state, report = self.before, None
        for key in self.keys if keys is None else keys:
            state, report = self.round(key, state, data, self.cohort if ids is None else ids)
        return state, report


def check(
    algorithm: Algorithm,
    data: FederatedData | None = None,
    *,
    state: State | None = None,
    skip: str | Collection[str] = (),
    generic: bool = True,
    moves_fixed: bool | Collection[str] = False,
    atol: float = 5e-5,
    seed: int = 7,
) -> None:
    """Demands of an algorithm all that the library's own are tested for, within a minute. It does not need pytest.

    Args:
      algorithm: any `Algorithm`.
      data: what it can train on: more than five clients with examples, of different sizes. By default `clients()`:
        eight of 1 to 200 examples, [12] float32, of five classes.
      state: what the rounds begin with, for a stage that takes over from training; by default `simulate.init`.
      skip: one or more names of `CLAUSES` that are left out, such as 'nobody' for a server that adds noise.
      generic: whether there is a generic model, `predict(server, None, x)`.
      moves_fixed: whether the server moves what is `fixed` of `Variables`, or the names of those parts that it moves.
      atol: how far results may be apart that differ in the order of sums alone.
      seed: of all randomness.

    Raises:
      ContractError: an `AssertionError` that names each broken clause, what was seen, and what to do.
      ValueError: for arguments that are not of their kind.
    """
    if not isinstance(skip, str | Collection):
        raise ValueError(f'skip must be names of clauses, not {checks.shown(skip)}')
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    if unknown := sorted(set(skip) - set(CLAUSES)):
        raise ValueError(f'no clause is called {", ".join(unknown)}; there are {", ".join(CLAUSES)}')
    data = clients() if data is None else here(data)
    try:
        play = Play(algorithm, data, state=state, generic=generic, moves_fixed=moves_fixed, atol=atol, seed=seed)
    except ValueError:
        raise
    except Exception as error:  # whatever jax or the algorithm raises while it is traced
        raise ContractError(f'trace: two rounds cannot be compiled and run: {in_one_line(error)}') from error
    broken, cause = [], None
    for name, clause in CLAUSES.items():
        if name in skip:
            continue
        try:
            said = clause(play)
        except Exception as error:
            said, cause = in_one_line(error), error
        if said:
            broken.append(f'{name}: {said}')
    if broken:
        raise ContractError('\n'.join(broken)) from cause


def trace(play: Play) -> str:
    """One trace, and the same structure, shapes and types round after round."""
    if said := restructured(play.before, play.state):
        return f'the state goes in and comes out as {said}: keep its structure'
    pairs = zip(jax.tree_util.tree_leaves_with_path(play.before), jax.tree.leaves(play.state), strict=True)
    for (path, u), v in pairs:
        if described(u) != described(v):
            place = jax.tree_util.keystr(path)
            return f'state{place} goes in as {described(u)} and comes out as {described(v)}: return what came in'
    if play.traces > 1:
        return (
            f'two rounds were traced {play.traces} times: a function of the algorithm does something else, or finds '
            'another type, the second time'
        )
    return ''


def pure(play: Play) -> str:
    """The same round twice has the same result bit for bit, and traced again it is the same program."""
    if said := changed(play.rounds(play.data)[0], play.state, 0):
        return f'the same rounds once more leave another state, {said}: draw random numbers from keys, not on the host'
    arguments = play.key, play.before, play.data, play.cohort
    # A new function, because jax remembers what it has traced and would not look again.
    again = jax.make_jaxpr(simulate.make_round(play.algorithm, chunk=play.chunk))(*arguments)
    programs = [
        _ADDRESS.sub('', str(made.jaxpr)) + str([np.asarray(u).tobytes() for u in plain(made.consts)])
        for made in (play.round.trace(*arguments).jaxpr, again)
    ]
    if programs[0] != programs[1]:
        return 'traced again, a round is another program: keep counters and random numbers in states and keys'
    return ''


def chunks(play: Play) -> str:
    """Clients one at a time, or two side by side with nobody beside the last, do the same."""
    other = Play(play.algorithm, play.data, state=play.before, chunk=1)
    if said := changed(other.state, play.state, play.atol):
        return (
            f'clients one at a time and two side by side leave different states, {said}: `aggregate.partial` must be '
            'a sum over messages, means are made in `finish`, and what `stacked` is given ignores rows of weight 0'
        )
    if said := changed(other.report.loss, play.report.loss, 0.2 * play.atol):
        return f'clients one at a time and two side by side report different losses, {said}: mean over real examples'
    return ''


def order(play: Play) -> str:
    """The order of messages, which are made up, does not change what the server makes of them."""
    before, (joining, follow) = play.before, (play.algorithm.aggregate, play.algorithm.server)
    shapes = jax.eval_shape(
        lambda server, client: play.algorithm.client(play.key, server, client, play.data.shard(0))[1],
        before.server,
        jax.tree.map(lambda u: u[0], before.clients),
    )
    rng = np.random.default_rng(0)
    weights, turned = jnp.array([3.0, 1.0, 0.0, 4.0, 2.0]), jnp.array([2, 4, 0, 1, 3])

    def drawn(u: Any) -> Array:
        shape = (_MEMBERS, *u.shape)
        if jnp.issubdtype(u.dtype, jnp.inexact):
            values = rng.uniform(0.5, 1.5, shape)
        else:  # no two alike, because numbers may say who has sent the message
            values = rng.permuted(np.broadcast_to(np.arange(_MEMBERS).reshape(-1, *[1] * u.ndim), shape), axis=0) + 1
        return jnp.asarray(values.astype(u.dtype)).at[2].set(0)  # as the engine has it where the weight is 0

    @jax.jit
    def join(sent: Tree, weights: Array) -> Tree:
        return joining.finish(joining.partial(sent, weights, jnp.arange(_MEMBERS), _MEMBERS))

    @jax.jit
    def serve(value: Tree) -> Tree:
        return follow(play.key, before.server, Aggregate(value, jnp.sum(weights), jnp.sum(jnp.sign(weights)), _MEMBERS))

    sent = jax.tree.map(drawn, shapes)
    values = join(sent, weights), join(jax.tree.map(lambda u: u[turned], sent), weights[turned])
    # What is joined may be the messages one by one, as long as the server does not mind their order.
    if changed(*values, play.atol) and (said := changed(serve(values[0]), serve(values[1]), play.atol)):
        return f'the same messages in another order lead to another server, {said}: nothing may depend on slots'
    return ''


def padding(play: Play) -> str:
    """Junk in the padding of the table of rows changes nothing."""
    data = play.data
    n = jnp.arange(data.index.shape[1])
    junk = (jnp.arange(data.num_clients)[:, None] * 31 + n * 17) % len(data.y)
    dirty = data._replace(index=jnp.where(n < data.size[:, None], data.index, junk).astype(data.index.dtype))
    if said := changed(play.rounds(dirty)[0], play.state, 0):
        return f'other rows in the padding of `shard.index` change the state, {said}: only the first `size` are real'
    return ''


def masks(play: Play) -> str:
    """Rows that only fill a batch count for nothing: a client of three examples does the same in a batch of three, or,
    where batches are no larger, of two in a batch of two. Smaller batches are not looked at. Nor do rows count that the
    pool holds for nobody."""
    for few in (3, 2):
        said, looked = _filled(play, few)
        if looked:
            return said
    return ''


def _filled(play: Play, few: int) -> tuple[str, bool]:
    """What `masks` says of a client of so few examples, and whether there were rows to fill."""
    data = play.data
    client = next(int(k) for k in play.by_size if data.size[k] >= min(few, int(jnp.max(data.size))))
    few = min(few, int(data.size[client]))
    size = jnp.minimum(data.size, few)
    held = jax.nn.one_hot(data.y[data.index[:, :few]], data.num_classes, dtype=jnp.int32)
    counts = jnp.sum(jnp.where(jnp.arange(few)[:, None] < size[:, None, None], held, 0), axis=1)
    wide = data._replace(size=size, counts=counts.astype(data.counts.dtype))
    pool = wide._replace(index=data.index[:, :few])  # batches are no wider than the table: there is nothing to fill
    narrow = pool._replace(x=jnp.concatenate([data.x, data.x]), y=jnp.concatenate([data.y, data.y]))
    ids = jnp.full(_MEMBERS, data.num_clients, jnp.int32).at[1].set(client)
    try:
        state, report = play.rounds(narrow, ids)
    except Exception:  # the width of a table is the method's own affair, as long as it is always the same
        return '', True
    other, _ = play.rounds(narrow, ids, play.keys[::-1])
    if changed(state, other, play.atol):
        return '', True  # dropout, augmentation, or batches of fewer: how they are filled may show in what is drawn
    filled, told = play.rounds(wide, ids)
    if float(told.padded_work) == float(report.padded_work):
        return '', False
    filling = f'{few} examples and rows that fill their batch'
    advice = 'leave out where `batch.mask` is False: `objective.masked_mean`, `classwise.means`'
    if said := changed(filled, state, play.atol):
        if more := changed(play.rounds(pool, ids)[0], state, play.atol):
            return f"rows that nobody holds change the state, {more}: `len(shard.x)` is nobody's number", True
        return f'{filling} leave another state than {few} alone, {said}: {advice}', True
    if said := changed(told.loss, report.loss, 0.2 * play.atol):
        return f'{filling} report another loss than {few} alone, {said}: {advice}', True
    return '', True


def owned(play: Play) -> str:
    """Not a bit changes if all rows but a client's own, labels included, turn into junk: nor if it owns none."""
    data = play.data
    emptied = int(play.cohort[-1])
    clean = data._replace(size=data.size.at[emptied].set(0), counts=data.counts.at[emptied].set(0))
    small = [int(k) for k in play.by_size if k != emptied][:2]
    for client in (*small, emptied):
        own = np.zeros(len(data.y), bool)
        own[np.asarray(data.index[client, : int(clean.size[client])])] = True
        mine = jnp.asarray(own)
        if jnp.issubdtype(data.x.dtype, jnp.inexact):
            junk = jnp.resize(jnp.array([jnp.nan, 3e38, -jnp.inf], data.x.dtype), data.x.shape)
        else:
            junk = ~data.x
        x = jnp.where(mine.reshape(-1, *[1] * (data.x.ndim - 1)), data.x, junk)
        dirty = clean._replace(x=x, y=jnp.where(mine, data.y, 10**6).astype(data.y.dtype))
        ids = jnp.full(_MEMBERS, data.num_clients, jnp.int32).at[1].set(client)
        one, other = (play.rounds(d, ids)[0] for d in (clean, dirty))
        holds = f'a client of {int(clean.size[client])} examples'
        if said := changed(one, other, 0):
            return f"others' examples reach {holds}: junk in them changes the state, {said}: use rows of `shard.index`"
        if said := unsound(other, play.before):
            return f'{holds} alone in a round leaves {said}: mind empty batches and division by 0'
    return ''


def finite(play: Play) -> str:
    """State and reports hold neither NaN nor infinity; a client's state may hold infinity that it began with."""
    if said := unsound(play.state, play.before):
        return f'two rounds leave {said}: mind division by 0, logarithms of 0 and classes that a client lacks'
    if said := unsound(play.report.info, None):
        return f'the report `info` has {said}: mind the client without a step'
    return ''


def absent(play: Play) -> str:
    """Clients that do not take part keep their state bit for bit."""
    before, after = (jax.tree.map(lambda u: u[play.absent], s.clients) for s in (play.before, play.state))
    if said := changed(before, after, 0):
        return f'the states of clients that did not take part have changed, {said}'
    wanted = sorted([*np.asarray(play.cohort).tolist(), play.data.num_clients])
    if sorted(np.asarray(play.report.ids).tolist()) != wanted:
        return f'the round was one of clients {np.asarray(play.report.ids).tolist()}, not {wanted}'
    return ''


def company(play: Play) -> str:
    """A client does the same in other company and in another lane."""
    guest = int(play.cohort[2])
    others = np.setdiff1d(play.by_size, [guest])
    found = []
    for ids in (np.asarray(play.cohort), np.array([*others[-4:], guest]), np.array([guest, *others[:4][::-1]])):
        state, report = play.round(play.key, play.before, play.data, jnp.asarray(ids, jnp.int32))
        at = int(np.flatnonzero(np.asarray(report.ids) == guest)[0])
        told = jax.tree.map(lambda u, at=at: u[at], report.info._replace(lane_slots=()))  # which company does change
        found.append((told, jax.tree.map(lambda u: u[guest], state.clients)))
    for other in found[1:]:
        said = changed(other[0], found[0][0], 1e-6) or changed(other[1], found[0][1], play.atol)
        if said:
            return f'a client does something else in other company, {said}: draw from the key that it is given alone'
    return ''


def several(play: Play) -> str:
    """Several rounds in one call are the same rounds."""
    inner = simulate.make_round(play.algorithm, chunk=2)
    together = jax.jit(simulate.several(lambda key, state, data: inner(key, state, data, play.cohort)))
    state, reports = together(play.keys, play.before, play.data)
    if said := changed(state, play.state, play.atol):
        return f'two rounds in one call and in two leave different states, {said}: what counts must be in the state'
    return '' if reports.loss.shape == (2,) else f'the losses of two rounds have the shape {reports.loss.shape}'


def resumed(play: Play) -> str:
    """Resumed from a checkpoint it goes on bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        files = _checkpoints.Files(Path(folder))
        files.save(1, play.round(play.keys[0], play.before, play.data, play.cohort)[0], play.key, [{'round': 1.0}])
        _, restored = files.restore(play.before, play.key)
    if said := changed(play.round(play.keys[1], restored, play.data, play.cohort)[0], play.state, 0):
        return f'resumed from a checkpoint it comes to another state, {said}: what a round needs must be in the state'
    return ''


def nobody(play: Play) -> str:
    """A round in which nobody holds an example moves no parameter, statistic or optimizer; without any `Variables` on
    the server, no prediction."""
    data = play.data
    none = data._replace(size=jnp.zeros_like(data.size), counts=jnp.zeros_like(data.counts))
    after, _ = play.round(play.key, play.state, none, play.cohort)
    models = [[(v.params, v.stats) for v in _variables(s.server)] for s in (play.state, after)]
    opts = [getattr(s.server, 'opt', ()) for s in (play.state, after)]
    advice = 'let the server stay as it was where `aggregate.clients` is 0'
    if said := changed(models[0], models[1], 0) or changed(opts[0], opts[1], 0):
        return f'a round without any example moves the server, {said}: {advice}'
    if not models[0]:
        client = None if play.generic else jax.tree.map(lambda u: u[0], play.state.clients)
        logits = [play.algorithm.predict(s.server, client, data.x[:3]) for s in (play.state, after)]
        if said := changed(logits[0], logits[1], 0):
            return f'a round without any example changes predictions, {said}: {advice}'
    if said := unsound(after, play.before):
        return f'a round without any example leaves {said}: mind division by 0'
    return ''


def predict(play: Play) -> str:
    """Predictions are logits of every class, of the generic model and of each client's, of each example by itself."""
    x, classes = play.data.x[:3], play.data.num_classes
    mine = jax.tree.map(lambda u: u[0], play.state.clients)
    for what, client in (('generic', None), ("client's", mine)):
        expects = play.generic or client is not None
        try:
            made = jax.eval_shape(play.algorithm.predict, play.state.server, client, x)
        except ValueError as error:
            if not expects:
                continue
            return f'the {what} model does not predict: {in_one_line(error)}' + (
                '; without one, say generic=False' if client is None else ''
            )
        if not expects:
            return 'without a generic model, predict(server, None, x) must raise ValueError and say so'
        if not isinstance(made, jax.ShapeDtypeStruct):
            return f'the {what} model makes {checks.shown(made)}, and logits are one array'
        if made.shape != (len(x), classes) or not jnp.issubdtype(made.dtype, jnp.floating):
            return (
                f'the {what} model makes {described(made)} of {len(x)} examples, and logits are '
                f'float32[{len(x)},{classes}]'
            )
    client, run = None if play.generic else mine, jax.jit(play.algorithm.predict)
    alone, among = run(play.state.server, client, x[:1]), run(play.state.server, client, x)[:1]
    if said := changed(alone, among, play.atol * max(1.0, float(jnp.max(jnp.abs(among))))):
        return f'an example alone and among others has different logits, {said.removeprefix("there ")}: do not mix rows'
    return ''


def fixed(play: Play) -> str:
    """What is `fixed` of the server's `Variables` never moves, or only those parts that `moves_fixed` names."""
    if play.moves_fixed is True:
        return ''
    left_out = play.moves_fixed or ()

    def kept(v: Variables) -> Tree:
        return {k: u for k, u in v.fixed.items() if k not in left_out} if isinstance(v.fixed, dict) else v.fixed

    before, after = ([kept(v) for v in _variables(s.server)] for s in (play.before, play.state))
    if said := changed(before, after, 0):
        return f'fixed parts have moved, {said}: put into `params` what is trained, or name it in moves_fixed'
    return ''


CLAUSES: dict[str, Callable[[Play], str]] = {
    clause.__name__: clause
    for clause in (
        trace, pure, chunks, order, padding, masks, owned, finite, absent, company, several, resumed, nobody, predict,
        fixed,
    )
}  # fmt: skip
"""The contract. A clause says in one line what was seen and what to do about it, and nothing where it is kept."""


def _variables(server: Tree) -> list[Variables]:
    """All that a server's state holds of them, wherever."""
    found = jax.tree.leaves(server, is_leaf=lambda u: isinstance(u, Variables))
    return [u for u in found if isinstance(u, Variables)]

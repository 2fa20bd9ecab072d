"""Local work of one client, written without a client axis.

Loops run as often as this client's own size asks, so that `vmap` over clients costs as much as the longest of them and
nothing needs to be compiled again when sizes change. They cannot be differentiated in reverse.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from fedjax_nc import checks, tree
from fedjax_nc.base import Array, Batch, Info, Shard, Tree

ClientOptimizer = Callable[[Array], optax.GradientTransformation]
"""From the round's number, [] int32, to an optimizer. Its state starts anew each round, as a schedule's would."""


class Plan(NamedTuple):
    """How much local work a client does. All of it is part of the compiled shapes.

    What full batches leave over of a pass is a batch too, padded to the smallest of `tails` that holds it, or to a full
    one. Results are the same up to the order of sums; each further size is compiled, and saves padding where clients
    run one at a time (side by side, lanes wait for every size that one of them needs).

    Clients side by side, the chunk of a round, differ in size, and all lanes would work until the largest is done.
    Where no more of them are left than one of `narrower` says, they go on in so many lanes. Each further number is
    compiled, too, and saves padding where many lanes are fast, as on GPUs. Results are the same up to rounding. A sweep
    that differentiates rounds, `vmap` of `jvp`, must leave it empty.

    Example:
      >>> from fedjax_nc import local
      >>> local.Plan(batch_size=32, epochs=5, tails=(8, 16))
      Plan(batch_size=32, epochs=5, tails=(8, 16), narrower=())
    """

    batch_size: int = 128  #: examples a step; a client with fewer takes all
    epochs: int = 3  #: passes over the client's examples in a round
    tails: tuple[int, ...] = ()  #: smaller batches, ascending
    narrower: tuple[int, ...] = ()  #: numbers of lanes, ascending; those that a chunk has or more are of no use to it


def checked(name: str, plan: Plan) -> None:
    """Refuses what is no plan of whole numbers of at least 1, or has tails that are not ascending below a full batch or
    narrower lanes that are not ascending.

    Args:
      name: what the caller calls it.
      plan: anything.

    Raises:
      ValueError: for all but such a plan.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f'{name} must be a local.Plan(batch_size, epochs), not {checks.shown(plan)}')
    if any(isinstance(number, jax.Array) for number in jax.tree.leaves(tuple(plan))):
        raise ValueError(f"{name} must hold numbers of Python's, for which programs are compiled, and no jax array")
    checks.whole(f'batch_size of {name}', plan.batch_size)
    checks.whole(f'epochs of {name}', plan.epochs)
    for field, told in (('tails', 'batch sizes'), ('narrower', 'numbers of lanes')):
        if not isinstance(value := getattr(plan, field), tuple):
            raise ValueError(f'{field} of {name} must be a tuple of {told}, not {checks.shown(value)}')
    for tail, larger in itertools.pairwise((*plan.tails, plan.batch_size)):
        checks.whole(f'each of the tails of {name}', tail)
        if tail >= larger:
            raise ValueError(f'tails of {name} must ascend below batch_size {plan.batch_size}: {plan.tails}')
    for lanes in plan.narrower:
        checks.whole(f'each of narrower of {name}', lanes)
    if any(lanes >= more for lanes, more in itertools.pairwise(plan.narrower)):
        raise ValueError(f'narrower of {name} must ascend: {plan.narrower}')


class Trained(NamedTuple):
    """What local training leaves behind."""

    params: Tree  #: of the structure that went in
    stats: Tree  #: running statistics at the end
    opt_state: Tree  #: of the optimizer
    info: Info  #: loss, steps, examples and batch rows


def sgd(
    lr: Array | float,
    momentum: Array | float = 0.9,
    weight_decay: Array | float = 5e-4,
    decay: Array | float = 1.0,
    clip: float | None = None,
) -> ClientOptimizer:
    """SGD with heavy-ball momentum and L2 decay added to the gradient.

    `g += weight_decay * theta; m = momentum * m + g; theta -= lr * decay**round * m`, as the published federated
    experiments use it.

    Args:
      lr: rate in the first round, whose number is 0; may be traced.
      momentum: in [0, 1); 0 keeps none; may be traced.
      weight_decay: times the parameters, added to the gradient; may be traced.
      decay: factor of the rate from round to round; may be traced.
      clip: norm to which the gradient is first scaled down, taken over everything that is trained; None for no limit.

    Returns:
      From the round's number to an optax optimizer, as algorithms take it.

    Raises:
      ValueError: for a negative rate, weight decay or `decay`, a momentum outside [0, 1), a `clip` that is not
        positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import local
      >>> opt = local.sgd(0.1, momentum=0.0, weight_decay=0.0, decay=0.5)(jnp.int32(2))  # that of the third round
      >>> updates, _ = opt.update(jnp.array([1.0, -2.0]), opt.init(jnp.zeros(2)))
      >>> [round(float(u), 4) for u in updates]
      [-0.025, 0.05]
    """
    for name, value in (('lr', lr), ('weight_decay', weight_decay), ('decay', decay)):
        checks.number(name, value)
    checks.number('momentum', momentum, high=1, open_high=True)
    decays, moves_on = (checks.traced(value) or bool(value) for value in (weight_decay, momentum))
    clipped = clipping(clip)

    def at(round: Array) -> optax.GradientTransformation:
        rate = lr * jnp.asarray(decay, jnp.float32) ** round
        return optax.chain(
            clipped,
            optax.add_decayed_weights(weight_decay) if decays else optax.identity(),
            optax.trace(momentum) if moves_on else optax.identity(),
            optax.scale_by_learning_rate(rate),
        )

    return at


def clipping(norm: float | None) -> optax.GradientTransformation:
    """An optax transformation that scales a gradient down to `norm` over all its leaves; None for no limit.

    Raises:
      ValueError: for a norm that is not positive.
    """
    if norm is None:
        return optax.identity()
    checks.number('clip', norm, open_low=True, finite=False, advice='None clips nothing')
    return optax.clip_by_global_norm(norm)


@jax.named_scope('shuffle')
def _shuffled(key: Array, shard: Shard, batch_size: int) -> Array:
    """Rows of the pool in random order, the client's real ones first: [N rounded up to full batches] int32."""
    n = shard.index.shape[0]
    draw = jnp.where(jnp.arange(n) < shard.size, jax.random.uniform(key, (n,)), jnp.inf)
    rows = _sorted_by_rank(draw, shard.index) if n <= _FEW else shard.index[jnp.argsort(draw)]
    return full_batches(rows, batch_size)


# Examples of a client up to which counting is quicker than sorting on a CPU (measured in `benchmarks/README.md`).
_FEW = 128


def _sorted_by_rank(by: Array, values: Array) -> Array:
    """`values[jnp.argsort(by)]` of few, each pair compared instead of sorted: vectors do it for all clients at once."""
    place = jnp.arange(len(by))
    before = (by < by[:, None]) | ((by == by[:, None]) & (place < place[:, None]))
    rank = jnp.sum(before, axis=1)
    return jnp.sum(jnp.where(rank[:, None] == place, values[:, None], 0), axis=0, dtype=values.dtype)


def full_batches(rows: Array, batch_size: int) -> Array:
    """Pads `rows [N]` with zeros to a multiple of `batch_size`."""
    return jnp.pad(rows, (0, -len(rows) % batch_size))


def batch_at(
    step: Array, rows: Array, shard: Shard, batch_size: int, key: Array | None = None, width: int | None = None
) -> Batch:
    """The examples `step * batch_size + [0, width)` of `rows`, of which the client owns the first ones.

    Those past its size are masked, and are copies of the first: what is masked is computed all the same, and because
    `0 * nan` is not 0, a row of somebody else's would reach gradients.

    Args:
      step: which batch, [] int32 from 0.
      rows: [n] int32 rows of the pool, the client's first, n a multiple of `batch_size`, as `full_batches` pads them.
      shard: the client's data.
      batch_size: examples of a full batch, B.
      key: for augmentation and dropout; None means evaluation.
      width: examples that are taken, up to B; a full batch by default.
    """
    start, width = step * batch_size, width or batch_size
    mask = start + jnp.arange(width) < shard.size
    picked = jnp.where(mask, jax.lax.dynamic_slice(rows, (start,), (width,)), rows[0])
    with jax.named_scope('gather'):
        x, y = shard.x[picked], shard.y[picked]
    return Batch(x, y, mask, shard.counts, key)


def local_sgd(
    key: Array,
    loss: Callable[[Tree, Tree, Batch], tuple[Array, Tree]],
    params: Tree,
    stats: Tree,
    opt: optax.GradientTransformation,
    shard: Shard,
    plan: Plan,
    opt_state: Tree | None = None,
) -> Trained:
    """Trains `params` for `plan.epochs` passes over the client's examples, reshuffled for each pass.

    The last batch of a pass may be partly padding: it is masked, and takes a step like the others. A client of size 0
    takes none and gets back what it gave.

    Args:
      key: the client's key for this round.
      loss: `(params, stats, batch) -> (scalar, new stats)`.
      params: any tree; all of it is trained.
      stats: running statistics, passed through `loss`.
      opt: optimizer.
      shard: the client's data.
      plan: batch size and epochs.
      opt_state: where the optimizer starts; by default `opt.init(params)`.

    Returns:
      Parameters, statistics and optimizer state at the end, and the `Info` of the work.

    Raises:
      ValueError: for a plan that `checked` refuses, or more epochs than examples can be counted of in int32.
    """
    checked('plan', plan)
    if plan.epochs * (shard.index.shape[0] + plan.batch_size) >= 2**31:
        raise ValueError(f'{plan.epochs} local epochs are more examples than can be counted: take fewer')
    b = min(plan.batch_size, shard.index.shape[0])
    steps, rest = -(-shard.size // b), shard.size % b
    tails = tuple(tail for tail in plan.tails if tail < b)
    fits = [(low < rest) & (rest <= tail) for low, tail in zip((0, *tails), tails, strict=False)]
    full = steps - sum(fits)  # batches of the widest kind
    gradient = jax.value_and_grad(loss, has_aux=True)

    def epoch(e: Array, carry: Tree) -> Tree:
        k_order, k_batch = jax.random.split(jax.random.fold_in(key, e))
        rows = _shuffled(k_order, shard, b)

        def step(width: int, s: Array, carry: Tree) -> Tree:
            params, stats, opt_state, total = carry
            batch = batch_at(s, rows, shard, b, jax.random.fold_in(k_batch, s), width)
            (value, stats), grads = gradient(params, stats, batch)
            with jax.named_scope('optimizer'):
                updates, opt_state = opt.update(grads, opt_state, params)
                params = optax.apply_updates(params, updates)
            return params, stats, opt_state, total + value * jnp.sum(batch.mask)

        if plan.narrower:
            *carry, slots = carry
            for width, begin, count in zip(
                (b, *tails), (jnp.int32(0), *(full for _ in tails)), (full, *fits), strict=True
            ):
                body = functools.partial(step, width)
                carry, steps = _in_lanes(begin, jnp.int32(count), body, tuple(carry), plan.narrower)
                slots += width * steps
            return *carry, slots
        carry = jax.lax.fori_loop(0, full, functools.partial(step, b), carry)
        for tail, fit in zip(tails, fits, strict=True):
            carry = jax.lax.fori_loop(full, full + fit, functools.partial(step, tail), carry)
        return carry

    start = (params, stats, opt.init(params) if opt_state is None else opt_state, jnp.float32(0))
    start += (jnp.int32(0),) if plan.narrower else ()
    params, stats, opt_state, total, *lane_slots = jax.lax.fori_loop(0, plan.epochs, epoch, start)
    examples = plan.epochs * shard.size
    loops = [plan.epochs * width for width in (full * b, *(tail * fit for tail, fit in zip(tails, fits, strict=True)))]
    info = Info(total / jnp.maximum(examples, 1), plan.epochs * steps, examples, sum(loops[1:], start=loops[0]))
    if plan.narrower:
        info = info._replace(lane_slots=lane_slots[0])
    elif plan.tails:  # as many as the plan has, however few examples fit in a batch here: all clients say the same
        unused = len(plan.tails) - len(tails)
        info = info._replace(loops=jnp.pad(jnp.stack(loops), (0, unused)))
    return Trained(params, stats, opt_state, info)


def _in_lanes(
    begin: Array, count: Array, body: Callable[[Array, Tree], Tree], carry: Tree, narrower: tuple[int, ...]
) -> tuple[Tree, Array]:
    """`fori_loop(begin, begin + count, body, carry)`, and the steps in which its lane was computed.

    Under `vmap` those that have the most to do go on in fewer lanes when the others are done.
    """
    carry = _promoted(body, carry)
    traced, out = jax.make_jaxpr(body, return_shape=True)(jnp.int32(0), carry)

    def part(first: Array, last: Array, begin: Array, held: list[Array], carry: Tree) -> Tree:
        """Steps from the `first` up to the `last`. `held` is what `body` closes over, such as the client's rows."""
        flat = core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, held))

        def step(s: Array, carry: Tree) -> Tree:
            return jax.tree.unflatten(jax.tree.structure(out), flat(begin + s, *jax.tree.leaves(carry)))

        return jax.lax.fori_loop(first, last, step, carry)

    @jax.custom_batching.custom_vmap
    def whole(count: Array, begin: Array, held: list[Array], carry: Tree) -> tuple[Tree, Array]:
        return part(jnp.int32(0), count, begin, held, carry), count

    @whole.def_vmap
    def _(
        size: int, batched: Sequence[Any], count: Array, begin: Array, held: list[Array], carry: Tree
    ) -> tuple[tuple[Tree, Array], Any]:
        if not any(jax.tree.leaves(batched)):
            alone = part(jnp.int32(0), count, begin, held, carry), count
            return alone, jax.tree.map(lambda _: False, alone)
        carry = jax.tree.map(lambda u, has: u if has else jnp.broadcast_to(u, (size, *jnp.shape(u))), carry, batched[3])
        in_carry = jax.tree.map(lambda _: True, carry)
        if not batched[0]:  # all have as much to do
            has_lanes = (False, False, batched[1], batched[2], in_carry)
            carry = tree.vmapped(part, has_lanes)(jnp.int32(0), count, begin, held, carry)
            return (carry, count), (in_carry, False)
        has_lanes = (False, True, batched[1], batched[2], in_carry)
        most, first, computed = jnp.argsort(-count), jnp.int32(0), jnp.zeros_like(count)
        widths = [size, *(n for n in reversed(narrower) if n < size)]
        for lanes, fewer in zip(widths, [*widths[1:], 0], strict=True):
            last = count[most[fewer]]  # from here on no more than `fewer` of them have anything to do
            who = slice(None) if lanes == size else most[:lanes]
            args = (first, jnp.minimum(count, last), begin, held, carry)
            of_them = jax.tree.map(lambda u, has: u[who] if has else u, args, has_lanes)  # noqa: B023
            some = tree.vmapped(part, has_lanes)(*of_them)
            carry = jax.tree.map(lambda u, v: u.at[who].set(v), carry, some)  # noqa: B023
            computed = computed.at[who].add(last - first)
            first = last
        return (carry, computed), (in_carry, True)

    return whole(count, begin, traced.consts, carry)


def _promoted(body: Callable[[Array, Tree], Tree], carry: Tree) -> Tree:
    """The carry with numbers of Python's in the types that `body` makes of them, as `fori_loop` would take them."""
    while True:
        before, after = (
            jax.tree.leaves(shapes)
            for shapes in (jax.eval_shape(lambda: carry), jax.eval_shape(body, 0, carry))  # noqa: B023
        )
        free = [u.weak_type and not v.weak_type for u, v in zip(before, after, strict=False)]
        if len(before) != len(after) or not any(free):
            return carry  # the loop has its own words for what is of another structure or type
        leaves = zip(jax.tree.leaves(carry), after, free, strict=True)
        typed = [jax.lax.convert_element_type(u, v.dtype) if first else u for u, v, first in leaves]
        carry = jax.tree.unflatten(jax.tree.structure(carry), typed)


def joined(first: Info, second: Info) -> Info:
    """The work of two phases: sums of `first` and `second`, with the loss of the second."""
    steps, examples, slots = (a + b for a, b in zip(first[1:4], second[1:4], strict=True))
    whole = Info(second.loss, steps, examples, slots)
    counted = [info.lane_slots for info in (first, second) if not isinstance(info.lane_slots, tuple)]
    if counted:
        whole = whole._replace(lane_slots=sum(counted[1:], start=counted[0]))
    elif isinstance(first.loops, tuple) and isinstance(second.loops, tuple):
        return whole
    loops = [jnp.atleast_1d(info.waits) for info in (first, second) if not isinstance(info.waits, tuple)]
    return whole._replace(loops=jnp.concatenate(loops)) if loops else whole


def sweep(fn: Callable[[Batch], Array], shard: Shard, batch_size: int, key: Array | None = None) -> Array:
    """`fn` of all the client's examples in index order: [N, ...], zero beyond its size.

    Args:
      fn: of a `Batch` of B examples, `[B, ...]` of any type.
      shard: the client's data.
      batch_size: B; all N at once where they are fewer.
      key: folded with the number of each batch; None means evaluation.
    """
    n = shard.index.shape[0]
    b = min(batch_size, n)
    rows = full_batches(shard.index, b)
    out = jax.eval_shape(lambda: fn(batch_at(jnp.int32(0), rows, shard, b)))
    filled = jnp.zeros((len(rows), *out.shape[1:]), out.dtype)

    def step(s: Array, filled: Array) -> Array:
        batch = batch_at(s, rows, shard, b, None if key is None else jax.random.fold_in(key, s))
        value = jnp.where(jnp.expand_dims(batch.mask, range(1, out.ndim)), fn(batch), 0)
        return jax.lax.dynamic_update_slice_in_dim(filled, value.astype(out.dtype), s * b, 0)

    return jax.lax.fori_loop(0, -(-shard.size // b), step, filled)[:n]


def featurize(features: Callable[[Batch], Array], shard: Shard, batch_size: int, key: Array | None = None) -> Shard:
    """The client's data seen through a fixed model: a shard whose pool is its own `features(batch)`, computed once.

    Its pool `[N, ...]` is in index order, so that row i is `shard.index[i]`; rows and labels beyond the client's size
    are zero. `batch_size` and `key` are those of `sweep`.
    """
    z = sweep(features, shard, batch_size, key)
    y = jnp.where(jnp.arange(len(z)) < shard.size, shard.y[shard.index], 0)
    return shard._replace(x=z, y=y, index=jnp.arange(len(z)))

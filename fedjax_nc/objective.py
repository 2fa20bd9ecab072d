"""Model, head and loss joined into the one thing that algorithms see."""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc._differences import in_one_line
from fedjax_nc.base import Array, Batch, FederatedData, Head, Loss, Model, Objective, Still, Tree, Variables
from fedjax_nc.models.classifier import classifies


def masked_mean(values: Array, mask: Array | None) -> Array:
    """Mean of `values [B]` over the rows where `mask [B]` holds, all if it is None: [] float32, 0 if there are none.

    Raises:
      ValueError: for other shapes: one number for all would count masked rows, and look like a mean.
    """
    checks.rows('values', values, 1)
    if mask is None:
        return jnp.mean(values, dtype=jnp.float32) if len(values) else jnp.float32(0)
    checks.rows('mask', mask, 1, len(values))
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)
    return jnp.sum(values) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def objective(model: Model, head: Head, loss: Loss) -> Objective:
    """The task of every client: `loss(head(model(x)), y)`.

    Args:
      model: the body, such as `models.from_flax(module)`.
      head: the classifier, such as `heads.linear()`.
      loss: `(logits [B, C], labels [B], counts [C]) -> [B]`, such as `losses.cross_entropy`.

    Returns:
      The objective. `params` of its `Variables` has the entries 'body' and 'head', `stats` are the model's, `fixed` is
      the head's; its loss is the float32 mean over the real examples of a batch.

    Raises:
      ValueError: for a model, head or loss that is none; on `init`, for parameters of less than float32, or for
        features, logits or losses of other shapes than [B, D], [B, C] and [B], or for a model that ends in a dense
        layer of as many outputs as there are classes; in training, for another number of classes in the data than in
        the head.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, losses, models, objective, testing
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> variables = task.init(jax.random.key(0), testing.clients())
      >>> {name: value.shape for name, value in variables.params['head'].items()}
      {'w': (16, 5), 'b': (5,)}
    """
    checks.kind('model', model, Model)
    checks.kind('head', head, Head)
    checks.called('loss', loss, 'logits, labels, counts', 'losses.cross_entropy')

    def init(key: Array, data: FederatedData) -> Variables:
        checks.kind('data', data, FederatedData)
        kb, kh = jax.random.split(key)
        # First parameters depend on shapes alone, and on nobody's example. Of two, so that a batch can be told apart.
        x = jnp.zeros((2, *data.x.shape[1:]), data.x.dtype)
        body, stats = model.init(kb, x[:1])
        z = _shape_of(lambda x: model.features(body, stats, x, None, None)[0], 'features [B, D]', 2, x)
        if z.shape[-1] == data.num_classes and classifies(model, body, stats, x):
            raise ValueError(
                f'the model ends in a dense layer of {data.num_classes} outputs, as many as there are classes: the '
                "classifier is the head's part, so give the body without it, or name that layer to the adapter, as in "
                "models.from_flax(module, classifier='Dense_2')"
            )
        made = head.init(kh, z.shape[-1], data.num_classes)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ValueError(
                f"a head's init makes (params, fixed), as that of heads.linear() does, not {checks.shown(made)}"
            )
        params, fixed = made
        if any(
            isinstance(u, float | int) for u in jax.tree.leaves(params)
        ):  # such as a temperature; others keep their order
            params = jax.tree.map(lambda u: jnp.float32(u) if isinstance(u, float | int) else u, params)
        logits = _shape_of(lambda z: head.logits(params, fixed, z), 'logits [B, C]', 2, z)
        y, counts = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (2, data.num_classes))
        try:
            each = jax.eval_shape(loss, logits, y, counts)
        except (TypeError, ValueError) as error:
            raise ValueError(
                'the loss is called with logits [B, C], labels [B] and counts [C], as losses.cross_entropy is, and '
                f'says: {in_one_line(error)}'
            ) from error
        _shaped(each, 'one loss for each example [B], whose mean the objective takes', 1)
        low = {str(u.dtype) for u in jax.tree.leaves((body, params)) if u.dtype in (jnp.bfloat16, jnp.float16)}
        if low:
            raise ValueError(
                f"parameters of {', '.join(low)}: updates and server states need float32, set the dtype of the model's "
                'computations instead'
            )
        return Variables({'body': body, 'head': params}, stats, fixed)

    def features(v: Variables, batch: Batch) -> tuple[Array, Tree]:
        key = batch.key if batch.beside is None or not model.augments else Still(batch.beside)
        return model.features(v.params['body'], v.stats, batch.x, batch.mask, key)

    def logits(v: Variables, z: Array) -> Array:
        try:
            return head.logits(v.params['head'], v.fixed, z)
        except KeyError as error:
            known = [name for part in (v.params.get('head'), v.fixed) if isinstance(part, Mapping) for name in part]
            raise ValueError(
                f'the head looks for {error} where there is {", ".join(known) or "nothing"}: the model was trained '
                'with another head, which stages after it must have, too'
            ) from error

    def batch_loss(v: Variables, z: Array, batch: Batch) -> Array:
        values = logits(v, z)
        if batch.counts is not None and values.shape[-1] != len(batch.counts):
            raise ValueError(
                f'the head tells {values.shape[-1]} classes apart and the data have {len(batch.counts)}: begin with '
                'simulate.init on these data, or give data.federate its num_classes'
            )
        return masked_mean(loss(values, batch.y, batch.counts), batch.mask)

    return Objective(init, features, logits, batch_loss)


def _shape_of(fn: Callable[..., Array], what: str, ndim: int, *args: Any) -> jax.ShapeDtypeStruct:
    """What a function of a batch of two returns, without computing it; refused if it is not `ndim` axes of two rows."""
    return _shaped(jax.eval_shape(fn, *args), what, ndim)


def _shaped(out: Any, what: str, ndim: int) -> jax.ShapeDtypeStruct:
    """Refuses what is not `ndim` axes of two rows."""
    shape = getattr(out, 'shape', None)
    if shape is None or len(shape) != ndim or shape[0] != 2:
        found = f'the shape {shape}' if shape is not None else f'a {type(out).__name__}'
        raise ValueError(f'expected {what}, and for a batch of 2 there came {found}')
    return out


def on_features(task: Objective) -> Objective:
    """The same task for examples `x [B, D]` that are features already, as `local.featurize` makes them.

    `stats` stay as they are; `init` remains that of `task`.

    Raises:
      ValueError: for a `task` that is no Objective.
    """
    checks.kind('task', task, Objective)
    return task._replace(features=lambda v, batch: (batch.x, v.stats))


def freezing(task: Objective, trained: Container[str]) -> Objective:
    """The task for training the top-level parameters in `trained`, of 'body' and 'head'.

    A body that is not among them runs in evaluation mode. Otherwise its running statistics would move, and the head see
    features that prediction does not.
    """
    if 'body' in trained:
        return task
    return task._replace(features=lambda v, batch: task.features(v, batch._replace(key=None, beside=None)))


def with_term(task: Objective, term: Callable[[Variables, Array, Batch], Array]) -> Objective:
    """The same task with a term added to its loss, also for methods that have a penalty of their own.

    Args:
      task: what is extended.
      term: `(variables, z [B, D], batch) -> [] float32`. It must leave out rows where `batch.mask` does not hold, and
        look at features through `z`: under `on_features` the examples `batch.x` are features, too.

    Raises:
      ValueError: for a `task` that is no Objective or a `term` that is no such function; in the first round, for a
        term that is no number.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import heads, losses, models, objective
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> def short(variables, z, batch):
      ...     return 0.01 * objective.masked_mean(jnp.sum(z**2, axis=-1), batch.mask)
      >>> task = objective.with_term(task, short)
    """
    checks.kind('task', task, Objective)
    checks.called('term', term, 'variables, features, batch', 'that of the example')

    def loss(v: Variables, z: Array, batch: Batch) -> Array:
        more = term(v, z, batch)
        checks.number('what term returns', more, -math.inf, finite=False)
        return task.loss(v, z, batch) + more

    return task._replace(loss=loss)


def transformed(task: Objective, transform: Callable[[Array], Array]) -> Objective:
    """The same task on features that went through `transform`: `[B, D] -> [B, D]`, in training and prediction.

    Raises:
      ValueError: for a `task` that is no Objective.
    """
    checks.kind('task', task, Objective)

    def features(v: Variables, batch: Batch) -> tuple[Array, Tree]:
        z, stats = task.features(v, batch)
        return transform(z), stats

    return task._replace(features=features)


def predict(task: Objective, v: Variables, x: Array) -> Array:
    """Logits [B, C] float32 of `x [B, ...]` by `task` and its variables `v`, in evaluation mode."""
    return task.logits(v, task.features(v, Batch(x))[0])

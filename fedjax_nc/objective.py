"""Model, head and loss joined into the one thing that algorithms see."""

from collections.abc import Callable, Container

import jax
import jax.numpy as jnp

from fedjax_nc.base import Array, Batch, FederatedData, Head, Loss, Model, Objective, Tree, Variables


def masked_mean(values: Array, mask: Array | None) -> Array:
    """Mean of `values [B]` over the rows where `mask [B]` holds, in float32; 0 if there are none."""
    if mask is None:
        return jnp.mean(values, dtype=jnp.float32)
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)
    return jnp.sum(values) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def objective(model: Model, head: Head, loss: Loss) -> Objective:
    """The task of every client: `loss(head(model(x)), y)`.

    `params` of its Variables has the entries 'body' and 'head', `fixed` is the head's.

    Raises:
      ValueError: on `init`, for parameters of less than float32.
    """

    def init(key: Array, data: FederatedData) -> Variables:
        kb, kh = jax.random.split(key)
        x = data.x[:1]
        body, stats = model.init(kb, x)
        z, _ = jax.eval_shape(lambda x: model.features(body, stats, x, None, None), x)
        params, fixed = head.init(kh, z.shape[-1], data.num_classes)
        low = {str(u.dtype) for u in jax.tree.leaves((body, params)) if u.dtype in (jnp.bfloat16, jnp.float16)}
        if low:
            raise ValueError(
                f"parameters of {', '.join(low)}: updates and server states need float32, set the dtype of the model's "
                'computations instead'
            )
        return Variables({'body': body, 'head': params}, stats, fixed)

    def features(v: Variables, batch: Batch) -> tuple[Array, Tree]:
        return model.features(v.params['body'], v.stats, batch.x, batch.mask, batch.key)

    def logits(v: Variables, z: Array) -> Array:
        return head.logits(v.params['head'], v.fixed, z)

    def batch_loss(v: Variables, z: Array, batch: Batch) -> Array:
        return masked_mean(loss(logits(v, z), batch.y, batch.counts), batch.mask)

    return Objective(init, features, logits, batch_loss)


def on_features(task: Objective) -> Objective:
    """The same task for examples that are features already, as `local.featurize` makes them."""
    return task._replace(features=lambda v, batch: (batch.x, v.stats))


def freezing(task: Objective, trained: Container[str]) -> Objective:
    """The task for training those top-level parameters: a body that is not among them runs in evaluation mode.

    Otherwise its running statistics would move, and the head see features that prediction does not.
    """
    if 'body' in trained:
        return task
    return task._replace(features=lambda v, batch: task.features(v, batch._replace(key=None)))


def transformed(task: Objective, transform: Callable[[Array], Array]) -> Objective:
    """The same task on transformed features: `[B, D] -> [B, D]`."""

    def features(v: Variables, batch: Batch) -> tuple[Array, Tree]:
        z, stats = task.features(v, batch)
        return transform(z), stats

    return task._replace(features=features)


def predict(task: Objective, v: Variables, x: Array) -> Array:
    """Logits [B, C] of `x [B, ...]` in evaluation mode."""
    return task.logits(v, task.features(v, Batch(x))[0])

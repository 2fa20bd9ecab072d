"""FedJAX: its FedAvg on a haiku model.

Each local step is a compiled function called from Python. Of its two backends, `pmap` over as many host devices as
there are cores is the faster one for convolutional networks on a CPU, and `jit`, its default, for small ones.
"""

import os
from importlib.metadata import version
from typing import Any

os.environ['JAX_TRACEBACK_FILTERING'] = 'off'  # the error itself is then the last line

import fedjax
import haiku as hk
import jax
import numpy as np
import optax
import serving


def network(model: str, widths: list[int], classes: int) -> hk.Transformed:
    """The same network as the workload's, with its names."""

    def forward(batch: dict[str, Any]) -> jax.Array:
        x = (batch['x'].astype(np.float32) / 255 - 0.5) / 0.5
        hidden = widths
        if model != 'mlp':
            own = (5, (32, 64), 'SAME', [512]) if model == 'cnn_mcmahan' else (3, (32, 64, 64), 'VALID', [64])
            size, channels, padding, hidden = own
            for i, width in enumerate(channels):
                x = jax.nn.relu(hk.Conv2D(width, size, padding=padding, name=f'Conv_{i}')(x))
                x = hk.max_pool(x, (2, 2, 1), (2, 2, 1), 'VALID') if i < 2 else x
        x = hk.Flatten()(x)
        for i, width in enumerate(hidden):
            x = jax.nn.relu(hk.Linear(width, name=f'Dense_{i}')(x))
        return hk.Linear(classes, name='head')(x)

    return hk.transform(forward)


class Rounds:
    """`state` is FedJAX's server state."""

    def __init__(self, work: serving.Workload) -> None:
        s = work.settings
        sample = {'x': work.x[:1], 'y': work.y[:1]}

        def train_loss(batch: dict[str, Any], logits: jax.Array) -> jax.Array:
            return fedjax.metrics.unreduced_cross_entropy_loss(batch['y'], logits)

        net = network(s['model'], s['widths'], work.counts.shape[1])
        model = fedjax.create_model_from_haiku(net, sample, train_loss)
        sgd, create = s['sgd'], fedjax.optimizers.create_optimizer_from_optax
        decayed = optax.chain(optax.add_decayed_weights(sgd['weight_decay']), optax.sgd(sgd['lr'], sgd['momentum']))
        self.algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            fedjax.model_grad(model), create(decayed), create(optax.sgd(1.0)),
            fedjax.ShuffleRepeatBatchHParams(batch_size=s['batch_size'], num_epochs=s['epochs']),
        )  # fmt: skip
        ids = range(len(work.size))
        self.data = [fedjax.ClientDataset({'x': work.x[work.rows(k)], 'y': work.y[work.rows(k)]}) for k in ids]
        self.names = {name: (name.split('/')[-2], name[-6:] in ('kernel', 'head/w')) for name in work.weights}
        params: dict[str, dict[str, np.ndarray]] = {}
        for name, (module, kernel) in self.names.items():
            params.setdefault(module, {})['w' if kernel else 'b'] = work.weights[name]
        expected = jax.tree_util.tree_map(np.shape, model.init(jax.random.PRNGKey(0)))
        assert jax.tree_util.tree_map(np.shape, params) == expected, expected
        self.state = self.algorithm.init(params)
        self.key = jax.random.PRNGKey(0)
        self.versions = {'fedjax': version('fedjax'), 'jax': jax.__version__}

    def round(self, ids: list[int]) -> None:
        self.key, *keys = jax.random.split(self.key, len(ids) + 1)
        clients = [(k, self.data[k], key) for k, key in zip(ids, keys, strict=True)]
        self.state, _ = self.algorithm.apply(self.state, clients)
        jax.block_until_ready(self.state.params)

    def weights(self) -> dict[str, np.ndarray]:
        params = self.state.params
        return {n: np.asarray(params[module]['w' if kernel else 'b']) for n, (module, kernel) in self.names.items()}


if __name__ == '__main__':
    channel = serving.Channel()
    work = serving.load(channel.path)
    if work.settings['model'] != 'mlp':
        os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={os.cpu_count()}'
        jax.config.update('jax_pmap_no_rank_reduction', False)  # as FedJAX expects it
        fedjax.set_for_each_client_backend('pmap')
    channel.serve(Rounds(work))

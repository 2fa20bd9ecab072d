"""Your model, your images: a flax nnx or equinox CNN trained by FedETF on a folder of images, saved and exported.

    python examples/own_model.py photos                     # photos/train/CLASS/*.png and photos/test/CLASS/*.png
    python examples/own_model.py photos --library equinox   # pip install "fedjax_nc[equinox]"

Nothing in the models knows of clients; of this library the nnx one takes a faster convolution.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_nc import data, evaluate, local, models, saving, simulate, training
from fedjax_nc.algorithms import fedetf
from fedjax_nc.base import Model
from fedjax_nc.experiments import command

WIDTHS = (32, 64, 128)


class Nnx(nnx.Module):
    """Three convolutions, of which the features are the mean over the image."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        pairs = zip((3, *WIDTHS), WIDTHS, strict=False)
        # On a CPU this form of a convolution is several times as fast as XLA's own in a loop over batches.
        self.convs = nnx.List(
            [nnx.Conv(i, o, (3, 3), conv_general_dilated=models.conv_by_platform, rngs=rngs) for i, o in pairs]
        )
        self.norms = nnx.List([nnx.BatchNorm(width, momentum=0.9, rngs=rngs) for width in WIDTHS])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.classifier = nnx.Linear(WIDTHS[-1], 1000, rngs=rngs)  # as it came; it is named below, and left out

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
        return self.classifier(self.dropout(jnp.mean(x, axis=(1, 2))))


def with_equinox() -> Model:
    """The same with group normalisation, written for one image with its channels first."""
    import equinox as eqx

    class Net(eqx.Module):
        convs: list
        norms: list

        def __init__(self, key: jax.Array) -> None:
            triples = zip((3, *WIDTHS), WIDTHS, jax.random.split(key, len(WIDTHS)), strict=False)
            self.convs = [eqx.nn.Conv2d(i, o, 3, padding=1, key=k) for i, o, k in triples]
            self.norms = [eqx.nn.GroupNorm(8, width) for width in WIDTHS]

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x, -1, 0)
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(norm(conv(x))))
            return jnp.mean(x, axis=(1, 2))

    return models.from_equinox(Net, data.images.pipeline(crop=4, flip=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path)
    parser.add_argument('--library', choices=('nnx', 'equinox'), default='nnx')
    parser.add_argument('--clients', type=int, default=20)
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--out', type=Path, default=Path('runs/own'))
    args = parser.parse_args()

    images = data.load_folder(args.folder, cache=args.out)
    parts = data.dirichlet(images.y_train, args.clients, alpha=0.3, seed=0)
    everything = data.federate(images.x_train, images.y_train, parts, images.num_classes)
    train, test = data.split(everything, 0.2, seed=0)
    if args.library == 'nnx':
        model = models.from_nnx(Nnx, data.images.pipeline(crop=4, flip=True), classifier='classifier')
    else:
        model = with_equinox()
    opt, plan = local.sgd(0.05), local.Plan(batch_size=32, epochs=2)
    algorithm, stage = fedetf.algorithm(model, opt, plan=plan), fedetf.personalize(model, opt, plan=plan, cycles=5)

    def accuracy(state: simulate.State) -> dict[str, jax.Array]:
        table = evaluate.generic(algorithm, state, images.x_test, images.y_test, images.num_classes)
        return {'accuracy': evaluate.accuracy(table)}

    k_init, k_train, k_tune = jax.random.split(jax.random.key(0), 3)
    state = simulate.init(algorithm, k_init, train)
    run = training.run(
        algorithm, k_train, state, train, rounds=args.rounds, cohort=max(1, args.clients // 4), evaluate=accuracy,
        eval_every=5, out=args.out, resume=True,
    )  # fmt: skip
    own = simulate.join(stage, k_tune, run.state.server, args.clients)
    own, _ = simulate.compiled(simulate.make_round(stage))(k_tune, own, train)
    personal = evaluate.over_clients(evaluate.per_client(stage, own, test))
    print(
        f'general {run.history[-1]["accuracy"]:.3f}, chance {1 / images.num_classes:.3f}; personal {personal.mean:.3f}'
    )

    said = {'classes': images.classes, 'about': {'model': f'{args.library} CNN {WIDTHS}', 'pixels': '[-1, 1]'}}
    saving.save(args.out / 'general.safetensors', algorithm, run.state, train, **said)
    one = min(3, args.clients - 1)
    saving.save(args.out / f'client-{one}.safetensors', stage, own, train, client=one, **said)
    saving.export(args.out / 'general.jax', algorithm, run.state, train, **said)
    saving.export(args.out / f'client-{one}.jax', stage, own, train, client=one, **said)
    print(f'written to {args.out}')


if __name__ == '__main__':
    command.script(main, 'own_model.py', resume=None)  # errors in a line; the same command goes on

"""Rounds traced here and written for other machines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import heads, local, losses, models, simulate
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import FederatedData
from fedjax_nc.objective import objective

PLATFORMS = ('cpu', 'cuda', 'tpu')
MODULES = {
    'mlp': models.MLP((8, 8)),
    'cnn': models.CNN(),
    'cnn_mcmahan': models.McMahanCNN(),
    'conv2': models.Conv2Cifar(),
    'moon_cnn': models.MoonCNN(),
    'vgg11': models.VGG11(),
    'resnet': models.ResNet(widths=(4, 8), blocks=(1, 1), norm='batch'),
    'resnet20': models.ResNet20(norm='batch'),
    'resnet18': models.ResNet18(norm='group'),
    'mobilenet': models.MobileNetV2(norm='batch'),
}
DEEP = ('resnet20', 'resnet18', 'mobilenet')


def shapes(side=32):
    def of(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    return FederatedData(of((60, side, side, 3), jnp.uint8), of((60,)), of((4, 16)), of((4,)), of((4, 10)))


def exported(module, data, *platforms, chunk=None):
    task = objective(models.from_flax(module), heads.linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, local.sgd(0.02), plan=local.Plan(8, 1))
    state = jax.eval_shape(lambda data: simulate.init(algorithm, toys.KEY, data), data)
    round = simulate.compiled(simulate.make_round(algorithm, chunk=chunk))
    return jax.export.export(round, platforms=platforms)(jax.eval_shape(lambda: toys.KEY), state, data), algorithm


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('name', ['mlp', 'cnn_mcmahan', 'resnet'])
def test_a_default_round_can_be_written_for_each_platform(name, platform):
    program, _ = exported(MODULES[name], shapes(), platform)
    assert program.platforms == (platform,)
    text = program.mlir_module()
    assert 'onednn$' not in text  # a machine of the same platform may lack it
    assert 'f64' not in text


@pytest.mark.parametrize('name', [pytest.param(n, marks=pytest.mark.slow) if n in DEEP else n for n in MODULES])
def test_one_file_serves_all_platforms(name):
    program, _ = exported(MODULES[name], shapes(), *PLATFORMS, chunk=2)
    assert program.platforms == PLATFORMS
    assert 'onednn$' not in program.mlir_module()


def test_what_was_written_computes_the_round():
    rng = np.random.default_rng(0)
    data = FederatedData(
        jnp.asarray(rng.integers(0, 256, (60, 12, 12, 3)), jnp.uint8), jnp.asarray(rng.integers(0, 10, 60), jnp.int32),
        jnp.asarray(rng.permutation(60)[:48].reshape(4, 12), jnp.int32), jnp.array([12, 5, 9, 1]),
        jnp.ones((4, 10), jnp.int32),
    )  # fmt: skip
    program, algorithm = exported(MODULES['resnet'], data, 'cpu')
    state = simulate.init(algorithm, toys.KEY, data)
    got = jax.tree.leaves(program.call(toys.KEY, state, data))
    want = jax.tree.leaves(jax.jit(simulate.make_round(algorithm))(toys.KEY, state, data))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=2e-4, atol=2e-5)

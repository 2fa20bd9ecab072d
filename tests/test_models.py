"""Bodies: the published parameter counts and layers, masks, precision, evaluation mode."""

import functools
import itertools
import re
from collections import defaultdict

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import data, heads, losses, models
from fedjax_nc.base import Still
from fedjax_nc.models import (
    CNN,
    MLP,
    VGG11,
    Conv2Cifar,
    McMahanCNN,
    MobileNetV2,
    MoonCNN,
    ResNet,
    ResNet18,
    ResNet20,
    ResNet34,
    ResNet50,
    from_flax,
)
from fedjax_nc.models.mobilenet import Depthwise
from fedjax_nc.models.resnet import normalisation
from fedjax_nc.objective import objective

KEY = jax.random.key(0)
TINY = {'widths': (4,), 'blocks': (1,)}
TINY_MOBILE = {'stem': 4, 'stages': ((1, 4, 1, 1), (2, 6, 1, 1), (2, 8, 1, 2)), 'features': 6, 'norm': 'batch'}


def images(seed, rows, side, channels=3):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (rows, side, side, channels)), jnp.uint8)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ('module', 'side', 'channels', 'parameters', 'dim', 'statistics'),
    [
        (CNN(), 32, 3, 121_920, 64, 0),
        (McMahanCNN(), 28, 1, 1_663_370 - 512 * 10 - 10, 512, 0),
        (MLP((200, 200)), 28, 1, 784 * 200 + 200 + 200 * 200 + 200, 200, 0),
        (ResNet20(norm='batch'), 32, 3, 271_824, 64, 2 * 784),
        (ResNet20(), 32, 3, 271_824, 64, 0),
        (ResNet18(), 64, 3, 11_168_832, 512, 0),
        (ResNet18(norm='batch'), 32, 3, 11_168_832, 512, 2 * 4_800),
        (ResNet18(norm_blocks=False), 64, 3, 11_161_152, 512, 0),
        (ResNet34(norm='batch'), 32, 3, 21_276_992, 512, 2 * 8_512),
        (ResNet50(norm='batch'), 32, 3, 23_500_352, 2048, 2 * 26_560),
        (MobileNetV2(norm='batch'), 32, 3, 2_284_112, 1280, 2 * 17_544),
        (MobileNetV2(), 64, 3, 2_284_112, 1280, 0),
        (Conv2Cifar(), 32, 3, 796_032, 192, 0),
        (MoonCNN(), 32, 3, 92_626 - 2_570, 256, 0),
        (VGG11(), 32, 3, 9_220_480, 512, 0),
        (MLP((1024, 1024, 128)), 28, 1, 1_984_640, 128, 0),
    ],
)
def test_parameter_counts(module, side, channels, parameters, dim, statistics):
    model, x = from_flax(module), jax.ShapeDtypeStruct((2, side, side, channels), jnp.uint8)
    params, stats = jax.eval_shape(model.init, KEY, x)
    z, _ = jax.eval_shape(model.features, params, stats, x, None, None)
    assert (count(params), z.shape, z.dtype) == (parameters, (2, dim), jnp.float32)
    assert count(stats) == statistics
    assert statistics or stats == ()


@pytest.mark.parametrize(
    ('module', 'side', 'classes', 'etf', 'linear'),
    [
        (CNN(), 32, 10, 126_081, 122_570),
        (ResNet20(), 32, 10, 272_475, 272_474),
        (ResNet20(), 32, 100, 278_325, 278_324),
        (ResNet18(), 64, 200, 11_271_433, 11_168_832 + 512 * 200 + 200),
    ],
)
def test_what_is_trained_with_a_head_has_the_published_size(module, side, classes, etf, linear):
    """A projection to as many dimensions as classes and a temperature, or, of the small CNN, to its 64."""
    y = np.arange(classes, dtype=np.int32)
    clients = data.federate(np.zeros((classes, side, side, 3), np.uint8), y, [y], classes)
    for head, want in ((heads.etf(None if etf != 126_081 else 64), etf), (heads.linear(), linear)):
        task = objective(from_flax(module), head, losses.cross_entropy)
        assert count(jax.eval_shape(lambda task=task: task.init(KEY, clients)).params) == want


def convolve(x, layer, stride=1, padding=0):
    """[B, H, W, I] with a kernel [h, w, I, O], or with [h, w, 1, I]: one for each channel."""
    x = np.pad(x, ((0, 0), *[(padding, padding)] * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, layer['kernel'].shape[:2], (1, 2))[:, ::stride, ::stride]
    alone = layer['kernel'].shape[2] < x.shape[3]
    sums = 'bhwcij,ijoc->bhwc' if alone else 'bhwcij,ijco->bhwo'
    return np.einsum(sums, windows, layer['kernel'], optimize=True) + layer.get('bias', 0)


def relu(x):
    return np.maximum(x, 0)


def pool(x):
    return (
        x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
        .reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1)
        .max((2, 4))
    )


def plain(padding, pooled, hidden, linear=0):
    """Convolutions, pooled where it says so, and dense layers; the last `linear` of them without ReLU."""

    def features(x, take, normed):
        for pooling in pooled:
            x = relu(convolve(x, take('Conv'), 1, padding))
            x = pool(x) if pooling else x
        x = x.reshape(len(x), -1)
        for rectified in [True] * hidden + [False] * linear:
            dense = take('Dense')
            x = x @ dense['kernel'] + dense['bias']
            x = relu(x) if rectified else x
        return x

    return features


def bottlenecks(x, take, normed):
    x = relu(normed(x, padding=1))
    for stride, widens in ((1, True), (2, True), (1, False)):
        y = normed(relu(normed(relu(normed(x)), stride, padding=1)))
        x = relu(y + (normed(x, stride) if widens else x))
    return x.mean((1, 2))


def basic_blocks_without_norm(x, take, normed):
    x = relu(normed(x, padding=1))
    for stride in (1, 2):
        y = convolve(relu(convolve(x, take('Conv'), stride, 1)), take('Conv'), 1, 1)
        x = relu(y + (x if stride == 1 else normed(x, stride)))
    return x.mean((1, 2))


def inverted_residuals(x, take, normed):
    """The blocks of TINY_MOBILE: only the second widens, only the last has a stride."""
    x = relu(normed(x, padding=1))
    for stride, widens in ((1, False), (1, True), (2, False)):
        y = normed(relu(normed(relu(normed(x)), stride, padding=1, kind='Depthwise')))
        if stride == 1:
            y = y + (normed(x) if widens else x)
        x = y
    return relu(normed(x)).mean((1, 2))


def drawn(model, x, *lead):
    """Parameters and statistics in NumPy, which takes no compilation; no scale, shift or statistic is trivial."""
    rng = np.random.default_rng(1)

    def draw(leaf):
        if leaf.ndim == 1:
            return rng.uniform(0.1, 0.9, (*lead, *leaf.shape)).astype(np.float32)
        scale = (2 / np.prod(leaf.shape[:-1])) ** 0.5
        return (scale * rng.normal(size=(*lead, *leaf.shape))).astype(np.float32)

    return jax.tree.map(draw, jax.eval_shape(model.init, KEY, x))


@pytest.mark.parametrize(
    ('module', 'side', 'published'),
    [
        (CNN(), 19, plain(0, [True, True, False], 1)),
        (McMahanCNN(), 9, plain(2, [True, True], 1)),
        (Conv2Cifar(), 17, plain(0, [True, True], 2)),
        (MoonCNN(), 17, plain(0, [True, True], 3, 1)),
        (VGG11(), 32, plain(1, [True, True, False, True, False, True, False, True], 0)),
        (ResNet((2, 3), (1, 2), bottleneck=True, norm='batch'), 5, bottlenecks),
        (ResNet((2, 4), (1, 2), bottleneck=True), 5, bottlenecks),
        (ResNet((2, 3), (1, 1), norm='batch', norm_blocks=False), 5, basic_blocks_without_norm),
        (MobileNetV2(**TINY_MOBILE), 5, inverted_residuals),
        (MobileNetV2(**TINY_MOBILE | {'norm': 'group'}), 5, inverted_residuals),
    ],
)
def test_layers_are_the_published_ones_in_their_order(module, side, published):
    model, x = from_flax(module), images(0, 2, side)
    params, stats = drawn(model, x)
    stats = {name: {**layer, 'var': layer['var'] / 30} for name, layer in stats.items()} if stats else stats
    z, _ = jax.jit(model.features)(params, stats, x, None, None)  # of large activations, none of which is cut off
    numbers = defaultdict(itertools.count)

    def take(kind):
        name = f'{kind}_{next(numbers[kind])}'
        layer = params[name] | (stats or {}).get(name, {})
        return {field: value.astype(np.float64) for field, value in layer.items()}

    def normed(x, stride=1, padding=0, kind='Conv'):
        x, norm = convolve(x, take(kind), stride, padding), take('BatchNorm' if stats else 'GroupNorm')
        if stats:
            return (x - norm['mean']) / np.sqrt(norm['var'] + 1e-5) * norm['scale'] + norm['bias']
        halves = x.reshape(*x.shape[:3], 2, -1)
        halves = (halves - halves.mean((1, 2, 4), keepdims=True)) / np.sqrt(halves.var((1, 2, 4), keepdims=True) + 1e-5)
        return halves.reshape(x.shape) * norm['scale'] + norm['bias']

    want = published((np.asarray(x, np.float64) / 255 - 0.5) / 0.5, take, normed)
    assert sum(next(n) for n in numbers.values()) == len(params)  # no layer is left over
    np.testing.assert_allclose(z, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    assert np.abs(want).max() > 1e-3


def test_group_norm_adds_what_pytorch_adds_to_variances():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return normalisation('group', 1, jnp.float32, True, None)(x)

    x = 0.003 * np.random.default_rng(0).normal(size=(1, 4, 4, 2)).astype(np.float32)
    z, _ = Normed().init_with_output(KEY, x)
    np.testing.assert_allclose(z, (x - x.mean()) / np.sqrt(x.var() + 1e-5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('module', 'side'),
    [
        (CNN, 18), (McMahanCNN, 4), (Conv2Cifar, 16), (MoonCNN, 16), (VGG11, 32), (MLP, 4),
        (functools.partial(ResNet, **TINY), 4), (functools.partial(MobileNetV2, **TINY_MOBILE), 4),
    ],
)  # fmt: skip
def test_products_are_of_the_type_and_the_form_that_were_asked_for(module, side):
    net = module(dtype=jnp.bfloat16, **({} if module is MLP else {'conv': models.conv_native}))
    x = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    variables = jax.eval_shape(net.init, KEY, x)
    text = str(jax.make_jaxpr(net.apply)(variables, x))
    found = re.findall(r':(\w+)\[\S+ = (?:conv_general_dilated|dot_general)\[', text)
    layers = [name for name in variables['params'] if name.startswith(('Conv', 'Dense'))]
    assert found == ['bf16'] * len(layers)
    run = functools.partial(net.apply, capture_intermediates=True, mutable=['intermediates'])
    inner = jax.eval_shape(run, variables, x)[1]['intermediates']
    del inner['__call__']  # what comes out of all may be a mean in float32
    assert {leaf.dtype for leaf in jax.tree.leaves(inner)} == {jnp.dtype('bfloat16')}


def test_vgg_starts_he_normal_by_fan_out_and_without_bias():
    for layer in from_flax(VGG11()).init(KEY, images(0, 1, 32))[0].values():
        np.testing.assert_array_equal(layer['bias'], 0)
        assert np.std(layer['kernel']) == pytest.approx((2 / (9 * layer['bias'].size)) ** 0.5, rel=0.05)
        assert np.abs(layer['kernel']).max() > 3 * np.std(layer['kernel'])  # no tail is cut off


def test_depthwise_equals_a_grouped_convolution():
    rng = np.random.default_rng(0)
    for stride in (1, 2):
        x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 5, 6, 4), (3, 3, 1, 4)))
        mine = lambda x, k, s=stride: Depthwise(s).apply({'params': {'kernel': k}}, x)  # noqa: E731
        grouped = lambda x, k, s=stride: jax.lax.conv_general_dilated(  # noqa: E731
            x, k, (s, s), [(1, 1)] * 2, dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=4
        )
        (got, back), (want, grouped_back) = jax.vjp(mine, x, kernel), jax.vjp(grouped, x, kernel)
        g = jnp.asarray(rng.normal(size=want.shape), jnp.float32)
        for a, b in zip((got, *back(g)), (want, *grouped_back(g)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_depthwise_kernel_gradients_are_summed_in_float32():
    # 20 * 20 ones: a bfloat16 accumulator would stop at 256.
    x, kernel = jnp.ones((1, 20, 20, 1), jnp.bfloat16), jnp.ones((3, 3, 1, 1))
    layer = lambda k: Depthwise(dtype=jnp.bfloat16).apply({'params': {'kernel': k}}, x)  # noqa: E731
    y, back = jax.vjp(layer, kernel)
    assert y.dtype == jnp.bfloat16
    assert float(back(jnp.ones_like(y))[0][1, 1, 0, 0]) == 400


def test_mobilenet_trains_under_vmap_and_padding_leaves_no_trace():
    model = from_flax(MobileNetV2(stem=4, stages=((2, 6, 1, 1),), features=5, norm='batch'))
    x = images(0, 6, 5).reshape(2, 3, 5, 5, 3)
    mask = jnp.array([[True, True, False], [False, False, False]])  # the second client is nobody

    def gradient(params, stats, x, mask):
        def loss(p):
            z, new = model.features(p, stats, x, mask, KEY)
            return jnp.sum(jnp.sin(z) * mask[:, None]), new

        return jax.grad(loss, has_aux=True)(params)

    params, stats = drawn(model, x[0], 2)
    grads, new = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradient))(params, stats, x, mask))
    alone = jax.tree.map(lambda leaf: leaf[0], (params, stats, np.asarray(x)[:, :2]))
    want = jax.tree.map(np.asarray, jax.jit(gradient)(*alone, np.ones(2, bool)))
    for a, b in zip(*map(jax.tree.leaves, ((grads, new), want)), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(b).max()))
    assert max(np.abs(leaf[0]).max() for leaf in jax.tree.leaves(grads)) > 1e-2
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_array_equal(leaf[1], 0)
    for a, b in zip(*map(jax.tree.leaves, (new, stats)), strict=True):
        np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize(
    ('module', 'side'), [(CNN(), 20), (McMahanCNN(), 9), (MLP((16, 8)), 5), (ResNet((4, 8), (1, 1)), 9)]
)
def test_features_are_rectified_float32_and_bfloat16_is_close(module, side):
    x = images(0, 6, side)
    model, half = from_flax(module), from_flax(module.copy(dtype=jnp.bfloat16))
    params, stats = model.init(KEY, x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(jax.eval_shape(half.init, KEY, x)))
    z, _ = jax.jit(model.features)(params, stats, x, None, None)
    low, _ = jax.jit(half.features)(params, stats, x, None, None)
    assert z.dtype == low.dtype == jnp.float32
    assert float(z.min()) >= 0
    assert float(z.max()) > 0
    error = float(jnp.linalg.norm(low - z) / jnp.linalg.norm(z))
    assert 0 < error < 0.03


@pytest.mark.parametrize('module', [CNN, McMahanCNN])
def test_gradients_do_not_depend_on_the_form(module):
    x = images(0, 3, 18)
    params, _ = from_flax(module()).init(KEY, x)

    def gradient(conv):
        features = from_flax(module(conv=conv)).features
        return jax.tree.leaves(jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(features(p, (), x, None, KEY)[0]))))(params))

    want = gradient(models.conv_native)
    for conv in (models.conv_patches, models.conv_sequential, models.conv_onednn):
        for a, b in zip(gradient(conv), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize('norm', ['group', 'batch'])
def test_padding_leaves_no_trace(norm):
    model, x = from_flax(ResNet(**TINY, norm=norm)), images(0, 5, 8)
    params, stats = drawn(model, x)
    junk, mask = x.at[3:].set(255), jnp.arange(5) < 3
    features = jax.jit(model.features)
    z, new = features(params, stats, junk, mask, KEY)
    short, want = features(params, stats, x[:3], None, KEY)
    np.testing.assert_allclose(z[:3], short, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if norm == 'batch':  # without the mask the junk is seen
        unmasked, _ = features(params, stats, junk, None, KEY)
        assert float(jnp.max(jnp.abs(unmasked[:3] - short))) > 1e-3


def test_evaluation_is_deterministic_and_keeps_the_statistics():
    model, x = from_flax(ResNet(**TINY, norm='batch')), images(0, 4, 8)
    params, stats = drawn(model, x)
    features = jax.jit(model.features)
    trained, new = features(params, stats, x, None, KEY)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(stats), strict=True))
    z, same = features(params, new, x, None, None)
    alone, _ = features(params, new, x[:1], None, None)
    np.testing.assert_allclose(alone, z[:1], rtol=1e-4, atol=1e-5)  # a row does not see its batch
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(jnp.max(jnp.abs(trained - z))) > 1e-3


def test_clients_with_their_own_parameters_may_be_vmapped():
    model, x = from_flax(ResNet(**TINY, norm='batch')), images(0, 6, 8).reshape(2, 3, 8, 8, 3)
    params, stats = drawn(model, x[0], 2)
    features = jax.jit(lambda p, s, x: model.features(p, s, x, None, KEY))
    z, new = jax.jit(jax.vmap(features))(params, stats, x)
    for i in range(2):
        mine = jax.tree.map(lambda leaf: leaf[i], (params, stats))  # noqa: B023
        want, stat = features(*mine, x[i])
        np.testing.assert_allclose(z[i], want, rtol=1e-4, atol=1e-5)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(stat), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """Dropout, to see where keys go."""

    @nn.compact
    def __call__(self, x, *, mask=None, train=False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(32)(x.reshape(x.shape[0], -1)))


def test_keys_reach_preprocessing_and_dropout():
    seen = []

    def preprocess(x, key):
        seen.append(key)
        return models.scale_images(x) if key is None else models.scale_images(x) + jax.random.normal(key, ())

    model, x = from_flax(Noisy(), preprocess), images(0, 2, 4)
    params, stats = model.init(KEY, x)
    assert seen == [None]
    a, b, again = (model.features(params, stats, x, None, jax.random.key(i))[0] for i in (1, 2, 1))
    np.testing.assert_array_equal(a, again)
    assert np.any(a != b)
    assert 0 < int((a == 0).sum()) < a.size
    z, _ = model.features(params, stats, x, None, None)
    assert seen[-1] is None
    assert not np.any(z == 0)


def test_augmentation_draws_by_itself_and_in_a_still_model_as_in_training():
    seen = []

    def noted(x, key):
        seen.append(None if key is None else tuple(jax.random.key_data(key).tolist()))
        return x

    model = models.from_functions(lambda key, x: {}, lambda params, x, key: noted(x, key), noted)
    for key in (KEY, Still(KEY)):
        model.features({}, (), jnp.ones((2, 3)), None, key)
    augment, noise, again, still = seen
    assert (again, still) == (augment, None)
    assert (model.augments, models.from_functions(lambda key, x: {}, lambda params, x: x).augments) == (True, False)
    assert len({augment, noise, tuple(jax.random.key_data(KEY).tolist())}) == 3


def test_bytes_are_scaled_and_floats_left_alone():
    np.testing.assert_allclose(models.scale_images(jnp.array([0, 51, 255], jnp.uint8)), [-1, -0.6, 1], atol=1e-6)
    x = jnp.array([0.3, 7.0], jnp.bfloat16)
    assert models.scale_images(x) is x
    tokens = jnp.array([3])
    assert models.scale_images(tokens) is tokens


@pytest.mark.parametrize(
    ('module', 'side'), [(CNN(), 17), (McMahanCNN(), 3), (Conv2Cifar(), 15), (MoonCNN(), 15), (VGG11(), 31)]
)
def test_small_images_are_refused(module, side):
    model = from_flax(module)
    jax.eval_shape(model.init, KEY, images(0, 1, side + 1))
    with pytest.raises(ValueError, match=f'at least {side + 1}x{side + 1}'):
        jax.eval_shape(model.init, KEY, images(0, 1, side))
    for x in (images(0, 1, side + 1)[:, :, 1:], images(0, 1, side + 1)[..., 0]):
        with pytest.raises(ValueError, match=f'at least {side + 1}x{side + 1}'):
            jax.eval_shape(model.init, KEY, x)


@pytest.mark.parametrize('module', [ResNet20, MobileNetV2])
def test_unknown_norm_is_refused(module):
    with pytest.raises(ValueError, match='norm is'):
        jax.eval_shape(from_flax(module(norm='layer')).init, KEY, images(0, 1, 8))

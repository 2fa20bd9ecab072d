"""Models by name: the library's, and those of users' own."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_nc import checks, models
from fedjax_nc._differences import in_one_line
from fedjax_nc.base import Model
from fedjax_nc.experiments import own
from fedjax_nc.models.adapter import Preprocess

MODELS: dict[str, Callable[..., nn.Module]] = {
    'mlp': models.MLP,
    'mlpnet': functools.partial(models.MLP, (1024, 1024, 128)),
    'cnn': models.CNN,
    'cnn_mcmahan': models.McMahanCNN,
    'conv2cifar': models.Conv2Cifar,
    'moon_cnn': models.MoonCNN,
    'vgg11': models.VGG11,
    'mobilenet': models.MobileNetV2,
    'resnet20': models.ResNet20,
    'resnet18': models.ResNet18,
    'resnet18_fednh': functools.partial(models.ResNet18, norm_blocks=False),
    'resnet34': models.ResNet34,
    'resnet50': models.ResNet50,
}
"""What makes each of the library's, given `dtype` and, where there is a choice, `norm` and `conv`."""
DENSE = ('mlp', 'mlpnet')
"""Models without a convolution."""


def named(name: str) -> Any:
    """What makes the model of a name in `MODELS`, or of one's own: 'package.module:attribute'.

    The attribute is a body, an instance of a `flax.linen.Module` or a `base.Model`; or makes one: a class of such
    modules, or a function. What makes one is called with two arguments, each only where the setting asks for it, and
    then it must take them: `dtype`, of its computations, for another precision than float32; and, of a function that
    makes a `base.Model`, `preprocess`, as `from_flax` has it, for pixels, crops and flips. A module is handed to
    `from_flax`.

    Args:
      name: of the model.

    Returns:
      The attribute.

    Raises:
      ValueError: for another name, a module that cannot be imported, or what is none of these.
    """
    if not own.is_own('model', name, MODELS):
        return MODELS[name]
    found = own.attribute('model', name)
    if not (isinstance(found, Model | nn.Module) or (callable(found) and found is not Model)):
        raise ValueError(
            f'model {name} must be a flax.linen.Module or a base.Model, or a class or function that makes one, not '
            f'{checks.shown(found)}'
        )
    return found


def build(
    name: str,
    *,
    norm: str = 'batch',
    precision: str = 'float32',
    conv: Any = None,
    preprocess: Preprocess | None = None,
) -> Model:
    """The model of a name.

    Args:
      name: see `named`.
      norm: of ResNets and MobileNet, 'batch' or 'group'.
      precision: of its computations.
      conv: the form of its convolutions, where that is the library's choice; by default by platform.
      preprocess: applied to each batch, see `from_flax`.

    Returns:
      The model, of which nothing is computed yet.

    Raises:
      ValueError: for a name as `named`, and where a model of one's own does not take what it is asked for.
    """
    made = named(name)
    if name in MODELS:
        norms = {'norm': norm} if name.startswith(('resnet', 'mobilenet')) else {}
        form = {} if conv is None or name in DENSE else {'conv': conv}
        return models.from_flax(made(dtype=jnp.dtype(precision), **norms, **form), preprocess)
    ready = isinstance(made, Model | nn.Module)
    names, several = ({}, False) if ready else own.takes(made)
    given: dict[str, Any] = {} if precision == 'float32' else {'dtype': jnp.dtype(precision)}
    if given and 'dtype' not in names and not several:
        raise ValueError(f'model {name}: for precision {precision!r} it must be made by what takes `dtype`')
    module = isinstance(made, type) and issubclass(made, nn.Module)  # which has no say in what batches go through
    handed = preprocess is not None and not module and 'preprocess' in names
    if handed:
        given['preprocess'] = preprocess
    if not ready:
        try:
            made = made(**given)
        except Exception as error:  # whatever a function of somebody else's raises
            said = in_one_line(error)
            advice = ': hand an nnx module to models.from_nnx in a function' if 'rngs' in said else ''
            raise ValueError(f'model {name}: {said}{advice}') from error
    if isinstance(made, nn.Module) and not handed:
        return models.from_flax(made, preprocess)
    if not isinstance(made, Model):
        kind = 'a base.Model, as what takes `preprocess` must' if handed else 'a flax.linen.Module or a base.Model'
        raise ValueError(f'model {name} made {checks.shown(made)}, not {kind}')
    if preprocess is not None and not handed:
        raise ValueError(
            f'model {name}: a base.Model prepares its batches itself: for pixels, crop and flip it must be made by a '
            'function that names `preprocess` among its arguments'
        )
    return made

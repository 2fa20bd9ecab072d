"""Feature extractors: flax bodies that end in features [B, D], and adapters from other libraries to `Model`."""

import importlib
from typing import TYPE_CHECKING, Any

from fedjax_nc.models.adapter import from_flax, from_functions, scale_images
from fedjax_nc.models.cnn import CNN, Conv2Cifar, McMahanCNN, MoonCNN
from fedjax_nc.models.convolution import (
    compiler_options,
    conv_by_platform,
    conv_grouped,
    conv_native,
    conv_onednn,
    conv_patches,
    conv_sequential,
)
from fedjax_nc.models.mlp import MLP
from fedjax_nc.models.mobilenet import MobileNetV2
from fedjax_nc.models.resnet import ResNet, ResNet18, ResNet20, ResNet34, ResNet50
from fedjax_nc.models.vgg import VGG11

if TYPE_CHECKING:
    from fedjax_nc.models.adapter_equinox import from_equinox
    from fedjax_nc.models.adapter_haiku import from_haiku
    from fedjax_nc.models.adapter_nnx import from_nnx

_LATER = {'from_equinox': 'equinox', 'from_haiku': 'haiku', 'from_nnx': 'nnx'}
"""Adapters by the library that they need, which is imported with them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    library = _LATER[name]
    try:
        adapter = importlib.import_module(f'{__name__}.adapter_{library}')
    except ModuleNotFoundError as error:
        raise ImportError(f'{name} needs {library}: pip install "fedjax_nc[{library}]"') from error
    return getattr(adapter, name)


__all__ = [
    'CNN',
    'MLP',
    'VGG11',
    'Conv2Cifar',
    'McMahanCNN',
    'MobileNetV2',
    'MoonCNN',
    'ResNet',
    'ResNet18',
    'ResNet20',
    'ResNet34',
    'ResNet50',
    'compiler_options',
    'conv_by_platform',
    'conv_grouped',
    'conv_native',
    'conv_onednn',
    'conv_patches',
    'conv_sequential',
    'from_equinox',
    'from_flax',
    'from_functions',
    'from_haiku',
    'from_nnx',
    'scale_images',
]

"""Feature extractors: flax bodies that end in features [B, D], and the adapter to `Model`."""

from fedjax_nc.models.adapter import from_flax, scale_images
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
    'from_flax',
    'scale_images',
]

"""Feature extractors: flax bodies that end in features [B, D], and the adapter to `Model`."""

from fedjax_nc.models.adapter import from_flax, scale_images
from fedjax_nc.models.cnn import CNN, McMahanCNN
from fedjax_nc.models.convolution import compiler_options, conv_native, conv_patches, conv_sequential, default_conv
from fedjax_nc.models.mlp import MLP
from fedjax_nc.models.resnet import ResNet, ResNet18, ResNet20

__all__ = [
    'CNN',
    'MLP',
    'McMahanCNN',
    'ResNet',
    'ResNet18',
    'ResNet20',
    'compiler_options',
    'conv_native',
    'conv_patches',
    'conv_sequential',
    'default_conv',
    'from_flax',
    'scale_images',
]

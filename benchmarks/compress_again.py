"""CIFAR-10 through JPEG (once more), to see what a copy that went through it costs.

    python benchmarks/compress_again.py --data-dir ~/data
    python -m fedjax_nc.experiments run fednh_1 --scale compressed --data-dir ~/data

Writes `cifar10-again.npz` there: images of `data.load_dataset('cifar10')`, encoded with quality 75 and halved colour
resolution, Pillow's default. Blocks begin four pixels off, so that images that have been encoded so already lose about
as much again as they lost the first time. Where only a JPEG copy is at hand, what a second pass costs is an estimate of
what the first one did.
"""

import argparse
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedjax_nc import data

OFF = 4  # pixels from the grid of an image's own blocks, half a block


def again(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images [N, H, W, 3] after JPEG with blocks that begin `OFF` pixels off."""
    found = np.empty_like(images)
    for to, image in zip(found, np.pad(images, ((0, 0), (OFF, OFF), (OFF, OFF), (0, 0)), 'edge'), strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, 'jpeg', quality=75)
        to[:] = np.asarray(Image.open(file))[OFF:-OFF, OFF:-OFF]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True)
    args = parser.parse_args()
    images = data.load_dataset('cifar10', args.data_dir)
    train, test = again(images.x_train), again(images.x_test)
    path = args.data_dir / 'cifar10-again.npz'
    whole = path.with_name(f'unfinished-{path.name}')
    np.savez(whole, x_train=train, y_train=images.y_train, x_test=test, y_test=images.y_test)
    whole.replace(path)
    print(f'{path}: test images changed by {changed(images.x_test, test):.1f} of 255')


def changed(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> float:
    """Root mean square difference of values."""
    return float(np.sqrt(np.mean((before.astype(float) - after) ** 2)))


if __name__ == '__main__':
    main()

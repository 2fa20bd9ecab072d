"""What travels between the server and its sites: arrays by their paths, checked before anything is made of them.

A record is read against a template, the shapes that the algorithm itself gives. Names, shapes and types are compared
with what the sender claims, the length of the bytes with the shape, and the header inside of them with both, before an
array is made: a record cannot make its reader hold more than the template's bytes. Nothing is unpickled.
"""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array as Packed
from flwr.app import ArrayRecord
from numpy.lib import format as npy

from fedjax_nc import _keys, tree
from fedjax_nc.base import Tree

HEADER = 1024  #: bytes that a header of NumPy's format may take at most
MOST = 1e30  #: largest absolute value that travels: sums of it stay finite


class WireError(ValueError):
    """A record is not what its reader must get; the message names the sender's first fault in one line."""


def pack(a: Tree, *, half: bool = False) -> ArrayRecord:
    """A tree of arrays as a record with the paths of its leaves as names.

    Args:
      a: any tree of arrays; random keys travel as their numbers.
      half: whether float32 of two axes or more travels as float16, at half of the bytes and 11 bits of precision.
        What has fewer are biases, which are small, and counts, which must be exact. An array with values beyond 65504,
        which float16 cannot hold, or with so many below 6e-5, for which it has fewer bits, that more than a thousandth
        of its norm would be lost, travels whole.

    Returns:
      The record.
    """
    record = {}
    for name, leaf in tree.by_path(_keys.plain(a)).items():
        value = np.asarray(leaf)
        if half and value.dtype == np.float32 and value.ndim > 1:
            with np.errstate(over='ignore', invalid='ignore'):
                short, exact = value.astype(np.float16), value.astype(np.float64)  # whose squares are finite
                lost = np.linalg.norm(short - exact)
            value = short if lost <= 2.0**-10 * np.linalg.norm(exact) else value
        record[name] = Packed(np.ascontiguousarray(value).reshape(value.shape))
    return ArrayRecord(record)


def unpack(record: ArrayRecord, like: Tree, who: str, *, most: float = MOST) -> Tree:
    """The tree that a record holds.

    Args:
      record: from another machine, which may send anything.
      like: the tree, or its shapes (`jax.eval_shape`), that it must be.
      who: the sender, for messages.
      most: the largest absolute value that passes; NaN does not.

    Returns:
      A tree like `like`; float16 becomes float32 again.

    Raises:
      WireError: for missing or further names, other shapes or types, a record that does not hold what it claims, or
        numbers beyond `most`.
    """
    wanted = tree.by_path(like)
    if odd := sorted(set(wanted) ^ set(record)):
        what = 'lacks' if odd[0] in wanted else 'holds'
        raise WireError(f'what {who} sent {what} {_short(odd[0])}, and {len(odd) - 1} more are one-sided')
    leaves = [_read(name, record[name], leaf, who, most) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _read(name: str, packed: Packed, leaf: Any, who: str, most: float) -> Any:
    """One leaf of a record, as `leaf` wants it."""
    bare = jax.eval_shape(_keys.plain, leaf) if _keys.keyed(leaf) else leaf
    shape, dtype = tuple(bare.shape), np.dtype(bare.dtype)
    allowed = {dtype, np.dtype(np.float16)} if dtype == np.float32 else {dtype}
    claimed = f'{packed.dtype}{list(packed.shape)}'[:60]
    if tuple(packed.shape) != shape or packed.dtype not in {str(d) for d in allowed} or packed.stype != 'numpy.ndarray':
        raise WireError(f'what {who} sent as {name} is {claimed} and must be {dtype}{list(shape)}')
    value = unpack_array(name, packed, shape, np.dtype(packed.dtype), who).astype(dtype)
    if dtype == np.bool_ and np.max(value.view(np.uint8), initial=0) > 1:
        raise WireError(f'what {who} sent as {name} is neither true nor false')
    if jnp.issubdtype(dtype, jnp.inexact) and value.size:
        largest = float(np.max(np.abs(value.astype(np.float32))))
        if not largest <= most:  # NaN, too
            raise WireError(f'what {who} sent as {name} goes to {largest:.3g}, and {most:.3g} is the most')
    return _keys.again(value, leaf)


def unpack_array(name: str, packed: Packed, shape: tuple[int, ...], there: np.dtype[Any], who: str) -> np.ndarray:
    """The array in NumPy's format that some bytes hold, if they hold one of this shape and type and nothing else."""
    claimed = f'{there}{list(shape)}'[:60]
    body = int(np.prod(shape)) * there.itemsize
    if not body <= len(packed.data) <= body + HEADER:
        raise WireError(f'what {who} sent as {name} takes {len(packed.data)} bytes, and {claimed} takes {body}')
    try:
        stream = io.BytesIO(packed.data)
        version = npy.read_magic(stream)
        inside = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    except Exception as error:  # NumPy's reader parses what the sender wrote
        raise WireError(f'what {who} sent as {name} cannot be read') from error
    if inside != (shape, False, there) or len(packed.data) - stream.tell() != body:
        raise WireError(f'what {who} sent as {name} holds something else than {claimed}')
    return np.frombuffer(packed.data, there, offset=stream.tell()).reshape(shape)


def _short(name: str) -> str:
    return name if len(name) <= 80 else name[:77] + '...'

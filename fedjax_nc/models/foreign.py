"""Python functions as foreign functions of XLA's CPU programs, by ctypes: they get addresses, not arrays.

That is for libraries in C whose work takes long beside the tens of microseconds of such a call. ctypes lets go of the
interpreter's lock while the library works. Described is the part of xla/ffi/api/c_api.h, version 0.3, that is used.
"""

import ctypes
from collections.abc import Callable
from typing import Any

START: Any = (('struct_size', ctypes.c_size_t), ('extension', ctypes.c_void_p))
ASKS_VERSION, EXECUTE, INTERNAL_ERROR = 1, 3, 13


class _Version(ctypes.Structure):
    _fields_ = (*START, ('major', ctypes.c_int), ('minor', ctypes.c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (('struct_size', ctypes.c_size_t), ('version', _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        ('struct_size', ctypes.c_size_t),
        ('kind', ctypes.c_int),
        ('next', ctypes.c_void_p),
        ('metadata', ctypes.POINTER(_Metadata)),
    )


class _Error(ctypes.Structure):
    _fields_ = (*START, ('message', ctypes.c_char_p), ('code', ctypes.c_int))


class _Api(ctypes.Structure):
    _fields_ = (
        *START,
        ('version', _Version),
        ('internal', ctypes.c_void_p),
        ('make_error', ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Error))),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (*START, ('dtype', ctypes.c_int), ('data', ctypes.c_void_p))


class _Buffers(ctypes.Structure):
    _fields_ = (
        *START,
        ('size', ctypes.c_int64),
        ('types', ctypes.c_void_p),
        ('each', ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Numbers(ctypes.Structure):
    _fields_ = (('dtype', ctypes.c_int), ('size', ctypes.c_size_t), ('data', ctypes.POINTER(ctypes.c_int64)))


class _Attributes(ctypes.Structure):
    _fields_ = (
        *START,
        ('size', ctypes.c_int64),
        ('types', ctypes.c_void_p),
        ('names', ctypes.c_void_p),
        ('each', ctypes.POINTER(ctypes.POINTER(_Numbers))),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ('struct_size', ctypes.c_size_t),
        ('extension', ctypes.POINTER(_Extension)),
        ('api', ctypes.POINTER(_Api)),
        ('context', ctypes.c_void_p),
        ('stage', ctypes.c_int),
        ('arguments', _Buffers),
        ('results', _Buffers),
        ('attributes', _Attributes),
    )


def handler(run: Callable[[list[int], list[int]], None]) -> Any:
    """What XLA calls, for `jax.ffi.pycapsule`; to be kept as long as programs may call it.

    Args:
      run: `(numbers, places)`, of the only attribute of the call, an array of int64, and the addresses of its arguments
        and results, in this order. What it raises becomes an error of the program.
    """

    def called(at: Any) -> int | None:
        frame = at.contents
        if frame.extension and frame.extension.contents.kind == ASKS_VERSION:
            version = frame.extension.contents.metadata.contents.version
            version.major, version.minor = 0, 3
            return None
        if frame.stage != EXECUTE:
            return None
        try:
            numbers = frame.attributes.each[0].contents
            buffers = [u.each[i].contents for u in (frame.arguments, frame.results) for i in range(u.size)]
            run(numbers.data[: numbers.size], [buffer.data for buffer in buffers])
        except Exception as error:  # nothing may leave a function that C calls
            text = f'{type(error).__name__}: {error}'.encode()
            told = _Error(struct_size=ctypes.sizeof(_Error), message=text, code=INTERNAL_ERROR)
            return frame.api.contents.make_error(ctypes.byref(told))
        return None

    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(called)

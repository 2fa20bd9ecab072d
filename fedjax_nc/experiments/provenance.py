"""What a result came from: versions, commit, device, memory."""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import fedjax_nc
from fedjax_nc._machine import device as device
from fedjax_nc.models import libdnnl

PACKAGES = ('fedjax_nc', 'jax', 'jaxlib', 'flax', 'optax', 'numpy')


def about() -> dict[str, Any]:
    """Date, device, versions, the library's commit if it runs from a checkout, and peak memory, for an appendix."""
    known, onednn = commit(), version(libdnnl.PACKAGE)
    return {
        'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
        'device': device(),
        'versions': {'python': platform.python_version(), **{name: version(name) for name in PACKAGES}}
        | ({libdnnl.PACKAGE: onednn} if onednn != 'unknown' else {}),
        **({'commit': known} if known else {}),
        **peak_memory(),
    }


def version(package: str) -> str:
    """That of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on the path without being installed
        return 'unknown'


@functools.cache
def commit() -> str:
    """The library's, as it was when this was first asked: code that changes while a program runs is not what runs."""
    return revision(Path(fedjax_nc.__file__).parent)


def running(name: str) -> str:
    """What `source` was when its module was imported, or at least when this was first asked after that."""
    module = sys.modules.get(name.partition(':')[0])
    return _running(name, id(getattr(module, '__spec__', None)))


@functools.cache
def _running(name: str, spec: int) -> str:
    """By the identity of the module's specification, too, which another import renews."""
    return source(name)


def source(name: str) -> str:
    """A digest of the file of what is a user's own and called 'package.module:attribute'; '' for other names."""
    module, own, _ = name.partition(':')
    if not own:
        return ''
    try:
        spec = importlib.util.find_spec(module)
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12] if spec and spec.origin else ''
    except (ImportError, OSError, ValueError):  # made in a notebook, or gone
        return ''


def revision(folder: Path) -> str:
    """The commit of the checkout that a folder belongs to, with '+' if tracked files differ from it; '' if none."""
    git = ['git', '-C', str(folder)]
    try:
        said = subprocess.run(
            [*git, 'rev-parse', 'HEAD', '--show-toplevel'], capture_output=True, text=True, timeout=10, check=True
        )
        head, top = said.stdout.split('\n')[:2]
        if Path(top) != folder.parent:  # a checkout of something else, in which the library is installed
            return ''
        same = subprocess.run([*git, 'diff', '--quiet', 'HEAD', '--', str(folder)], timeout=10, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ''
    return head + ('+' if same.returncode else '')


HIGH_WATER = Path('/proc/self/clear_refs'), Path('/proc/self/status')
"""Where Linux forgets the most that a process has held, and tells it."""


def forget_peak() -> None:
    """From here on `peak_memory` tells of what follows, where the system can: on Linux, and not of devices."""
    with contextlib.suppress(OSError):
        HIGH_WATER[0].write_text('5')


def peak_memory() -> dict[str, int]:
    """The most bytes that this process has held since `forget_peak`, and the most on a device if that tells.

    Of the device, and where the system does not forget, since the process began.
    """
    found = {}
    with contextlib.suppress(OSError):
        if told := re.search(r'^VmHWM:\s*(\d+) kB', HIGH_WATER[1].read_text(), re.MULTILINE):
            found['peak_process_bytes'] = 1024 * int(told[1])
    if not found:
        with contextlib.suppress(ImportError):  # not on Windows
            import resource

            unit = 1 if platform.system() == 'Darwin' else 1024
            found['peak_process_bytes'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    stats = jax.devices()[0].memory_stats() or {}
    if 'peak_bytes_in_use' in stats:
        found['peak_device_bytes'] = int(stats['peak_bytes_in_use'])
    return found

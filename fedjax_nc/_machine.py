"""The machine that computes."""

import os
import platform
import re
from pathlib import Path

import jax


def device() -> str:
    """What computes: the accelerator, or the processor and its number of cores."""
    if jax.default_backend() != 'cpu':
        return jax.devices()[0].device_kind
    about = Path('/proc/cpuinfo')
    found = re.search(r'model name\s*: (.*)', about.read_text()) if about.exists() else None
    name = found[1] if found else platform.processor() or 'unknown processor'
    return f'{name}, {os.cpu_count()} cores'

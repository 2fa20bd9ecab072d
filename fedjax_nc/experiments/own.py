"""What users have written themselves, by where Python imports it from: 'package.module:attribute'."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fedjax_nc import checks
from fedjax_nc._differences import in_one_line
from fedjax_nc.experiments import provenance


def is_own(what: str, name: str, known: Iterable[str], kind: str = 'attribute') -> bool:
    """Whether a name is one of a user's own, and not one of the library's.

    Args:
      what: what is named, for messages.
      name: one of `known`, or 'package.module:attribute'.
      known: the library's names.
      kind: what the attribute is, for messages.

    Raises:
      ValueError: for a name that is neither.
    """
    if isinstance(name, str) and name in (known := tuple(known)):
        return False
    if not isinstance(name, str) or ':' not in name:
        possible = ', '.join(known)
        raise ValueError(f"{what} must be one of {possible}, or 'module:{kind}', not {checks.shown(name)}")
    return True


def attribute(what: str, name: str) -> Any:
    """What a name stands for.

    Args:
      what: what it is to be, for messages.
      name: 'package.module:attribute', of a module that can be imported.

    Returns:
      The attribute of the module.

    Raises:
      ValueError: for a file, and a module that cannot be imported or has no such attribute.
    """
    module, _, attribute = name.partition(':')
    if not module or module.startswith('.') or module.endswith('.py') or {'/', '\\'} & set(name):
        raise ValueError(f"{what} {name}: name a module as `import` does, 'package.module:attribute', and no file")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module raises as it is imported
        advice = ': is its folder in PYTHONPATH?' if isinstance(error, ModuleNotFoundError) else ''
        raise ValueError(f'{what} {name}: {in_one_line(error)}{advice}') from error
    provenance.running(name)  # before the file changes; of a module that was imported before, it may have
    if not hasattr(found, attribute):
        raise ValueError(f'{what} {name}: the module {module} has no {checks.shown(attribute)}')
    return getattr(found, attribute)


def takes(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """A function's arguments, and whether it takes others, too.

    Args:
      function: or a class.

    Returns:
      Their defaults by name, None where there is none. No names of what does not tell any, such as a function of a
      compiled module.
    """
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, False
    empty = inspect.Parameter.empty
    defaults = {argument.name: None if argument.default is empty else argument.default for argument in known}
    return defaults, any(argument.kind is argument.VAR_KEYWORD for argument in known)

"""The site: `python -m sphinx -W docs build/site`, with the extra `docs`."""

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import fedjax_nc

HERE = Path(__file__).parent

project = 'fedjax_nc'
author = 'the authors of fedjax_nc'
version = release = fedjax_nc.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.mathjax',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx-mathjax-offline',  # formulas without a network, too
    'sphinx_copybutton',
    'sphinx_design',
]

html_theme = 'sphinx_book_theme'
html_title = 'fedjax_nc'
html_theme_options = {
    'show_navbar_depth': 1,
    'show_toc_level': 2,
    'use_download_button': False,
    'use_fullscreen_button': False,
    'navbar_persistent': [],
}
html_show_sourcelink = False
templates_path: list[str] = []
exclude_patterns = ['_build']

myst_enable_extensions = ['colon_fence', 'dollarmath', 'deflist', 'attrs_inline']
myst_heading_anchors = 4
# Notebooks are shown as they are stored; the tests execute them.
nb_execution_mode = 'off'

# Docstrings put names and formulas into single backticks.
default_role = 'code'
autodoc_member_order = 'bysource'
autoclass_content = 'both'  # what a constructor takes is said where it is
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
copybutton_exclude = '.linenos, .gp, .go'


def _bring_notebooks() -> None:
    """The notebooks stand beside the examples; Sphinx reads only what is below this folder."""
    shelf = HERE / 'notebooks'
    shelf.mkdir(exist_ok=True)
    for path in (HERE.parent / 'examples').glob('*.ipynb'):
        shutil.copyfile(path, shelf / path.name)


def _write_reference() -> None:
    """A page for each module that `api/index.md` names: what it defines, or what a package says that it exports."""
    shelf = HERE / 'api'
    for name in re.findall(r'\]\(generated/([\w.]+)\.md\)', (shelf / 'index.md').read_text()):
        module = importlib.import_module(f'fedjax_nc.{name}')
        options = ':members:\n:undoc-members:\n'
        if name == 'models':
            options += ':exclude-members: name, parent, scope\n'  # flax's own fields
        if hasattr(module, '__all__'):
            options += ':imported-members:\n'
        page = shelf / 'generated' / f'{name}.md'
        page.parent.mkdir(exist_ok=True)
        text = f'# `{name}`\n\n```{{eval-rst}}\n.. automodule:: fedjax_nc.{name}\n'
        text += ''.join(f'   {line}\n' for line in options.splitlines()) + '```\n'
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _formulas_as_they_stand(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings set formulas and programs apart by a blank line and four spaces; that is how they are shown."""
    out: list[str] = []
    inside = False
    for before, line in zip(['', *lines], lines, strict=False):
        if line.strip():
            apart = len(line) - len(line.lstrip()) >= 4
            if apart and not before.strip() and not inside:
                out += ['::', '']
            inside = apart and (inside or not before.strip())
        out.append(line)
    lines[:] = out


def _fields_as_they_stand(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What is said of a field is a sentence, in which a colon does not follow a type; some fields need none."""
    if what in ('attribute', 'data') and lines and lines[-1].startswith(':type: '):
        lines[:] = [f'{lines[-1].removeprefix(":type: ")}: {lines[0]}']
    if lines and lines[0].startswith('Alias for field number'):
        lines.clear()
    lines[:] = [line for line in lines if not line.startswith('Create new instance of')]  # every NamedTuple's


def _links_to_notebooks(app: Any, page: str, source: list[str]) -> None:
    """In a clone they lead to the notebooks beside the examples, in the site to its own copies."""
    source[0] = re.sub(r'\]\((?:\.\./)+examples/(\w+\.ipynb)\)', r'](/notebooks/\1)', source[0])


def setup(app: Any) -> None:
    app.connect('source-read', _links_to_notebooks)
    app.connect('autodoc-process-docstring', _formulas_as_they_stand, priority=400)  # napoleon has 500
    app.connect('autodoc-process-docstring', _fields_as_they_stand, priority=600)


_bring_notebooks()
_write_reference()

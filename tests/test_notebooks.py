"""The notebooks as a reader runs them, and as they are shipped.

`notebook_checks/NAME.py` says of examples/NAME.ipynb: `NUMBERS`, the source of a cell that is run after all others and
prints one line of JSON; `check(seen)`, whether these numbers support the text; and `PICTURES`, how many there are.
"""

import importlib
import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / 'examples').glob('*.ipynb'))
CHECKS = {
    path.stem: importlib.import_module(f'notebook_checks.{path.stem}')
    for path in sorted((Path(__file__).parent / 'notebook_checks').glob('*.py'))
}


def shipped(name):
    return nbformat.read(ROOT / 'examples' / f'{name}.ipynb', as_version=4)


def outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get('outputs', [])]


def pictures(notebook):
    return [out.data['image/png'] for out in outputs(notebook) if 'image/png' in out.get('data', {})]


def test_every_notebook_has_its_checks():
    assert list(CHECKS) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize('name', CHECKS)
def test_it_runs_and_shows_what_its_text_says(name, tmp_path):
    notebook = shipped(name)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name].NUMBERS))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name='python3', resources={'metadata': {'path': str(tmp_path)}}
    )
    client.execute()  # raises where a cell fails
    assert len(pictures(notebook)) == CHECKS[name].PICTURES
    assert not [out for out in outputs(notebook) if out.get('name') == 'stderr']
    CHECKS[name].check(json.loads(notebook.cells[-1].outputs[-1].text))


@pytest.mark.parametrize('name', NAMES)
def test_the_shipped_copy_is_complete_and_clean(name):
    notebook = shipped(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(out.output_type != 'error' and out.get('name') != 'stderr' for out in outputs(notebook))
    assert len(pictures(notebook)) == CHECKS[name].PICTURES
    text = (ROOT / 'examples' / f'{name}.ipynb').read_text()
    assert len(text) < 1_000_000
    for place in ('/home/', '/tmp/', '/root/', '/work/', 'site-packages', 'Warning'):
        assert place not in text

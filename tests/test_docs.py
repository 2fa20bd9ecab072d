"""The pages of the documentation: their programs run as they stand, and what they list is all that there is."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedjax_nc
from fedjax_nc import algorithms, testing
from fedjax_nc.experiments import study

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
PAGES = sorted(path for folder in (DOCS, DOCS / 'guides', DOCS / 'methods') for path in folder.glob('*.md'))


def blocks(page, language='python'):
    """The code blocks of a page in one language."""
    return re.findall(rf'^```{language}\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)


def right(logits, said):
    """Share of the test images of digits that are told rightly."""
    return float(np.mean(np.argmax(logits, 1) == said['digits'].y_test))


def an_exported_model_is_the_saved_one(said):
    assert right(said['logits'], said) == right(said['exported'], said) > 0.85
    np.testing.assert_allclose(said['exported'], said['logits'], atol=1e-5)
    assert said['personal'].shape == said['logits'].shape
    assert int(said['more'].state.server.round) == 17


def bodies_make_features(said):
    assert said['z'].shape == (5, 32)
    assert said['widths'] == [(5, 64)] * 3


def data_on_the_host_train_as_well(said):
    # Another program may add in another order, and rounds of training amplify that.
    again = said['algorithm'].predict(said['again'].state.server, None, said['digits'].x_test)
    assert (np.argmax(again, 1) == np.argmax(said['logits'], 1)).mean() > 0.98
    assert (said['sites'].num_clients, int(said['sites'].size.sum())) == (3, 321)
    assert said['photos'].x_train.shape == (32, 12, 12, 3)


def clauses_tell_what_is_broken(said):
    assert said['said'].startswith('nobody: ')
    table = (DOCS / 'guides' / 'algorithm.md').read_text().split('| clause |')[1].split('\n\n')[0]
    assert re.findall(r'^\| `(\w+)` \|', table, re.MULTILINE) == list(testing.CLAUSES)


def personal_models_gain(said):
    assert said['after'].mean > said['before'].mean
    assert 0.5 < said['fair'].mean <= 1


def clients_are_split(said):
    assert said['train'].num_clients == said['test'].num_clients == 20


def a_run_is_resumed(said):
    assert said['summary']['personal_accuracy'] > 0.5
    assert [row['round'] for row in said['run'].history] == list(range(1, 9))
    assert len(said['seen']) == 3
    assert Path('board').is_dir()


def the_robust_mean_goes_on(said):
    assert [row['broken'] for row in said['run'].history] == [1, 1]
    assert said['state'].server.variables is not None


CHECKS = {
    'guides/algorithm.md': clauses_tell_what_is_broken,
    'guides/data.md': data_on_the_host_train_as_well,
    'guides/experiments.md': a_run_is_resumed,
    'guides/export.md': an_exported_model_is_the_saved_one,
    'guides/model.md': bodies_make_features,
    'guides/partitions.md': clients_are_split,
    'guides/personal.md': personal_models_gain,
    'guides/scale.md': the_robust_mean_goes_on,
}
"""What must come of the programs of a page, beside that they run."""


def named(page):
    return page.relative_to(DOCS).as_posix()


QUICK = ('getting-started.md',)
"""Pages whose programs run in every suite. The others' together take minutes."""


def program(page):
    return pytest.param(page, id=named(page), marks=[] if named(page) in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize('page', [program(page) for page in PAGES if blocks(page)])
def test_the_programs_of_a_page_run(page, tmp_path, monkeypatch):
    """All of them from top to bottom in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    said: dict = {}
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f'{named(page)}, program {number}', 'exec'), said)
    if check := CHECKS.get(named(page)):
        check(said)


@pytest.mark.parametrize('page', [page for page in PAGES if blocks(page)], ids=named)
def test_every_name_of_a_page_is_defined_on_it(page):
    """In every suite, because most pages run in the slow part alone."""
    readers = "builtins = ['my_digits']"  # names that stand for what a reader has
    ruff = [sys.executable, '-m', 'ruff', 'check', '--isolated', '--select', 'F811,F821', '--config', readers, '-']
    checked = subprocess.run(ruff, input='\n'.join(blocks(page)), capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_pages_with_checks_have_programs():
    assert {named(page) for page in PAGES if blocks(page)} >= set(CHECKS)


@pytest.mark.parametrize('page', [page for page in PAGES if blocks(page, 'toml')], ids=named)
def test_every_study_of_a_page_is_one(page):
    for text in blocks(page, 'toml'):
        assert study.Study.of(tomllib.loads(text), page.stem).runs


def prose(page):
    """A page without what stands between fences, line by line."""
    blank = re.sub(
        r'^(`{3,}|:{3,}).*?^\1', lambda found: '\n' * found[0].count('\n'), page.read_text(), flags=re.S | re.M
    )
    return blank.splitlines()


@pytest.mark.parametrize('page', PAGES, ids=named)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r'\]\(([^)\s]+)\)', '\n'.join(prose(page))):
        path = target.split('#')[0]
        if not path or '://' in path or path.startswith('mailto:'):
            continue
        assert (page.parent / path).exists(), f'{named(page)} links to {target}'


@pytest.mark.parametrize('page', PAGES, ids=named)
def test_prose_fits_into_lines(page):
    """Tables and links may be longer."""
    assert not [
        f'{number}: {line}'
        for number, line in enumerate(prose(page), 1)
        if len(line) > 120 and not line.lstrip().startswith('|') and '](' not in line
    ]


FILES = {'csv', 'ipynb', 'json', 'jsonl', 'md', 'npz', 'parquet', 'png', 'py', 'safetensors', 'tex', 'toml'}


@pytest.mark.parametrize('page', PAGES, ids=named)
def test_names_of_the_library_exist(page):
    """`simulate.make_round`, `fedavg.algorithm` and {py:func}`fedjax_nc.simulate.make_round` in the running text."""
    missing = []
    for name in re.findall(r'`((?:[a-z_]+\.)+[A-Za-z_]+)(?=[`(])', '\n'.join(prose(page))):
        first, *rest = name.removeprefix('fedjax_nc.').split('.')
        if name.rpartition('.')[2] in FILES:
            continue
        found = getattr(fedjax_nc, first, None) or getattr(algorithms, first, None)
        if inspect.ismodule(found) and not reached(found, rest):
            missing.append(name)
    assert not missing


def reached(found, names):
    """Whether attributes lead from one to the next; fields of records may have no value in the class."""
    for name in names:
        if name in getattr(found, '__annotations__', {}):
            return True
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True

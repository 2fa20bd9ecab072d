"""The notebook as a reader runs it, and as it is shipped."""

import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')

PATH = Path(__file__).parent.parent / 'examples/fedetf.ipynb'

NUMBERS = """
import json
print(json.dumps({
    'agreement': [float(similarity.mean_pairwise_cosine(w)) for w in (unbiased, biased)],
    'follows': float(follows),
    'last': {method: {name: training.last_mean(run.history, name) for name in run.history[-1]}
             for method, run in runs.items()},
    'FedETF personal': curve,
    'FedAvg personal': update,
}))
"""


@pytest.fixture(scope='module')
def shipped():
    return nbformat.read(PATH, as_version=4)


def outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get('outputs', [])]


def pictures(notebook):
    return [out.data['image/png'] for out in outputs(notebook) if 'image/png' in out.get('data', {})]


def test_it_runs_and_shows_what_its_text_says(shipped, tmp_path):
    notebook = nbformat.from_dict(shipped)
    notebook.cells.append(nbformat.v4.new_code_cell(NUMBERS))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name='python3', resources={'metadata': {'path': str(tmp_path)}}
    )
    client.execute()  # raises where a cell fails
    assert len(pictures(notebook)) == len(pictures(shipped)) == 6
    seen = json.loads(notebook.cells[-1].outputs[-1].text)
    even, uneven = seen['agreement']
    assert uneven < 0.8 < even
    assert seen['follows'] > 0.8
    etf, average = seen['last']['FedETF'], seen['last']['FedAvg']
    assert etf['accuracy'] > average['accuracy'] + 0.01
    assert etf['NC1'] < average['NC1']
    assert etf['NC2'] < 0.7 * average['NC2']
    assert etf['NC3'] > average['NC3'] + 0.1
    assert len(seen['FedETF personal']) == 12
    for accuracies in (seen['FedETF personal'], seen['FedAvg personal']):
        assert accuracies[0] + 0.02 < accuracies[1] < accuracies[-1] + 0.01


def test_the_shipped_copy_is_complete_and_clean(shipped):
    nbformat.validate(shipped)
    code = [cell for cell in shipped.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(out.output_type != 'error' and out.get('name') != 'stderr' for out in outputs(shipped))
    text = PATH.read_text()
    assert len(text) < 1_000_000
    for place in ('/home/', '/tmp/', '/root/', 'site-packages', 'Warning'):
        assert place not in text

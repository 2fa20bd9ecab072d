"""The page on what users bring, and the example of a whole program."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / 'docs' / 'your-own.md').read_text()


def test_the_programs_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: dict = {}
    for block in re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL):
        exec(block, said)
    right = {name: float(np.mean(np.argmax(said[name], 1) == said['digits'].y_test)) for name in ('logits', 'exported')}
    assert right['logits'] == right['exported'] > 0.85
    np.testing.assert_allclose(said['exported'], said['logits'], atol=1e-5)
    assert said['personal'].shape == said['logits'].shape
    assert said['z'].shape == (5, 32)
    # Another program may add in another order, and 15 rounds of training amplify that.
    again = said['algorithm'].predict(said['again'].state.server, None, said['digits'].x_test)
    assert (np.argmax(again, 1) == np.argmax(said['logits'], 1)).mean() > 0.98


@pytest.mark.parametrize('library', ['nnx', 'equinox'])
def test_a_model_of_another_library_learns_a_folder_of_images(library, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    for split, each in (('train', 24), ('test', 6)):
        for c, name in enumerate(('blue', 'green', 'red')):
            (tmp_path / 'photos' / split / name).mkdir(parents=True)
            for i in range(each):
                pixels = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
                pixels[..., 2 - c] += 120
                Image.fromarray(pixels).save(tmp_path / 'photos' / split / name / f'{i}.png')
    monkeypatch.syspath_prepend(ROOT / 'examples')
    import own_model

    out = tmp_path / 'out'
    few = ['--clients', '4', '--rounds', '5', '--out', str(out)]
    monkeypatch.setattr(sys, 'argv', ['own_model.py', str(tmp_path / 'photos'), '--library', library, *few])
    own_model.main()
    general, personal = re.search(r'general (\S+), chance 0.333; personal (\S+)', capsys.readouterr().out).groups()
    assert max(float(general), float(personal)) > 0.6
    names = {'general.safetensors', 'client-3.safetensors', 'general.jax', 'client-3.jax', 'general.jax.json'}
    assert names < {path.name for path in out.iterdir()}

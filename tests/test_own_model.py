"""The example of a whole program on a model and images of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['own_model.py', 'absent'], 'absent is not there: give a folder of images'),
        (['paper_figures.py', 'ccvr', '--data', 'empty'], 'empty has no images in train/ or test/'),
    ],
)
def test_a_wrong_folder_ends_a_program_in_one_line(words, said, tmp_path):
    (tmp_path / 'empty').mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / 'examples' / words[0], *words[1:]],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, '')
    assert done.stderr.startswith(f'{words[0]}: error: {said}')
    assert len(done.stderr.splitlines()) == 1

"""The server, which has no digits at all. `flwr run -c 'out="FOLDER"'` tells where the run is kept."""

from flwr.app import Context

from digits.agreed import agreed
from fedjax_nc import flower


def folder(context: Context) -> str:
    out = str(context.run_config['out'])
    if not out:
        raise ValueError('name the folder of the run: flwr run -c \'out="/path/of/the/run"\'')
    return out


# A round waits for its sites for a minute, and for the last of them no longer than 10 s after two have answered.
patience = flower.Patience(round=60.0, rest=10.0, start=600.0)
app = flower.server_app(agreed, folder, least=2, patience=patience, evaluate_every=5)

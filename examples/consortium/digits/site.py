"""A site: `node_config` tells which one it is, and where it keeps its state."""

from pathlib import Path

from flwr.app import Context

from digits.agreed import CLASSES, agreed, rows_of
from fedjax_nc import data, flower


def site(context: Context) -> flower.Site:
    number = int(context.node_config['site'])
    x, y, held_out = rows_of(number)
    train, test = (data.federate(x[rows], y[rows], [range(rows.sum())], CLASSES) for rows in (~held_out, held_out))
    return flower.Site(number, train, Path(str(context.node_config['folder'])), test)


app = flower.client_app(agreed, site)

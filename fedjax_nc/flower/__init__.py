"""From simulation to machines: an algorithm's clients as sites under Flower, and its server as theirs.

Flower carries messages, keeps lists of who is there, starts programs and knows who is who; what is computed is the
algorithm's own, by the functions of simulation, with keys derived as there. A deployed run gives the model of
`training.run` with the same keys and data, up to what compilers round otherwise in one program than in several.

    phase = flower.Phase(algorithm, key, rounds=20)
    agreed = flower.Agreement((phase,), init_key, clients=3, example=..., num_classes=10)
    app = flower.client_app(agreed, site)          # at each site; site(context) -> flower.Site(number, data, folder)
    app = flower.server_app(agreed, 'run')         # at the server

Messages are arrays by their paths, of the shapes and types that the algorithm gives, and are checked before anything is
made of them. Needs the extra `flower`.
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("fedjax_nc.flower needs Flower: pip install 'fedjax_nc[flower]'") from error

from fedjax_nc.flower._plan import Agreement, Phase, Secure, join
from fedjax_nc.flower._rounds import Patience
from fedjax_nc.flower._server import server_app
from fedjax_nc.flower._site import Site, client_app
from fedjax_nc.flower._wire import WireError

__all__ = ['Agreement', 'Patience', 'Phase', 'Secure', 'Site', 'WireError', 'client_app', 'join', 'server_app']

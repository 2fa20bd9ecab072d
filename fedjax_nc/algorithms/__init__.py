"""One file per method; each exports `algorithm(...)`, and stages are named functions beside it."""

from fedjax_nc.algorithms import fedavg as fedavg
from fedjax_nc.algorithms import fedetf as fedetf
from fedjax_nc.algorithms import fedprox as fedprox
from fedjax_nc.algorithms import finetune as finetune

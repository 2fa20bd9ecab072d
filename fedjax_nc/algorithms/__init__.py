"""One file per method; each exports `algorithm(...)`, and stages are named functions beside it."""

from fedjax_nc.algorithms import ccvr as ccvr
from fedjax_nc.algorithms import fedavg as fedavg
from fedjax_nc.algorithms import fedetf as fedetf
from fedjax_nc.algorithms import fedetf_gmv as fedetf_gmv
from fedjax_nc.algorithms import fedloge as fedloge
from fedjax_nc.algorithms import fednh as fednh
from fedjax_nc.algorithms import fedprox as fedprox
from fedjax_nc.algorithms import feduh as feduh
from fedjax_nc.algorithms import finetune as finetune
from fedjax_nc.algorithms import latest as latest

"""One file per method; each exports `algorithm(...)`, and stages are named functions beside it.

A method outside of this folder is called 'package.module:algorithm' on the command line and in studies, see
`experiments.recipes.named`; `testing.check` proves that it does what every algorithm must.
"""

from fedjax_nc.algorithms import ccvr as ccvr
from fedjax_nc.algorithms import creff as creff
from fedjax_nc.algorithms import ditto as ditto
from fedjax_nc.algorithms import fedavg as fedavg
from fedjax_nc.algorithms import fedaws as fedaws
from fedjax_nc.algorithms import fedbabu as fedbabu
from fedjax_nc.algorithms import fedbn as fedbn
from fedjax_nc.algorithms import feddyn as feddyn
from fedjax_nc.algorithms import fedetf as fedetf
from fedjax_nc.algorithms import fedetf_gmv as fedetf_gmv
from fedjax_nc.algorithms import fedloge as fedloge
from fedjax_nc.algorithms import fedmmd as fedmmd
from fedjax_nc.algorithms import fednh as fednh
from fedjax_nc.algorithms import fednova as fednova
from fedjax_nc.algorithms import fedper as fedper
from fedjax_nc.algorithms import fedproto as fedproto
from fedjax_nc.algorithms import fedprox as fedprox
from fedjax_nc.algorithms import fedrep as fedrep
from fedjax_nc.algorithms import fedrod as fedrod
from fedjax_nc.algorithms import fedrs as fedrs
from fedjax_nc.algorithms import feduh as feduh
from fedjax_nc.algorithms import finetune as finetune
from fedjax_nc.algorithms import latest as latest
from fedjax_nc.algorithms import moon as moon
from fedjax_nc.algorithms import ratioloss as ratioloss
from fedjax_nc.algorithms import scaffold as scaffold
from fedjax_nc.algorithms import solo as solo

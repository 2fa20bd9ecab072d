"""Neural-collapse-inspired federated learning in pure functional JAX.

An algorithm is a record of pure functions written for one client; `simulate` owns the client axis; everything that
happens, training or personalisation, is a round.
"""


import pytest
import toys

from fedjax_nc.base import FederatedData


@pytest.fixture(scope='session')
def data() -> FederatedData:
    """Eight clients of very unequal size on Gaussian clusters of five classes; most lack some class."""
    return toys.ragged([100, 7, 60, 33, 200, 1, 50, 149])

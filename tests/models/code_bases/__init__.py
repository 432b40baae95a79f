"""Training runs in the manner of public code bases, written anew and small: each takes a policy, `None` for plain JAX.

The models and their losses know nothing of mpjax. A loop has the lines that a user of mpjax writes.
"""

from tests.models.code_bases._big_vision import big_vision
from tests.models.code_bases._diffrax import diffrax, ode
from tests.models.code_bases._jaxpi import jaxpi
from tests.models.code_bases._mamba import mamba
from tests.models.code_bases._purejaxrl import purejaxrl
from tests.models.code_bases._tunix import tunix

__all__ = ["RUNS", "ode"]

RUNS = {f.__name__: f for f in (big_vision, purejaxrl, jaxpi, tunix, mamba, diffrax)}

"""The models and datasets that come with mpjax, registered as a plug-in's are.

`mpjax.train` knows none of them by name: this package needs only what a user's plug-in needs.
"""

from mpjax.zoo import data, models

__all__ = ["data", "models"]

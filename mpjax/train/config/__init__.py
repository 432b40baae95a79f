"""Configs, and the code that they choose from: plug-ins, and the zoo, which is always there."""

from mpjax.zoo import registered as registered

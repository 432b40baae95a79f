"""The models and datasets that come with mpjax.

A model here is a plain Flax module. `mpjax.zoo.registered` registers all for configs, as a plug-in does.
"""

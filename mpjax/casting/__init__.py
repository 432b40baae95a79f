"""Autocast: a jaxpr transform that gives each operation its dtype."""

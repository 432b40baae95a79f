"""Registers the models and datasets that come with mpjax. Needs only what a user's plug-in needs."""

from mpjax.zoo import data as data
from mpjax.zoo.models import _classifiers as _classifiers
from mpjax.zoo.models import _language_model as _language_model

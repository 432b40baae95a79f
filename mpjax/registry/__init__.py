"""What a plug-in needs: models, data and optimisers by name, their config keys, and facts about data.

`mpjax.train` exports all of it; `mpjax.zoo` registers the models and datasets that come with mpjax.
"""

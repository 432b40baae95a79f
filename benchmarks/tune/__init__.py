"""What a search for a policy finds for the example configs, and how good its predictions are."""

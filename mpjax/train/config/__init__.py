"""The config of a run: its keys and checks, the YAML file, registered kinds and plug-ins."""

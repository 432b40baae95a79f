"""Training runs from a YAML config; `import mpjax` needs nothing of this."""

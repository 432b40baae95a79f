"""How exact each gradient is."""

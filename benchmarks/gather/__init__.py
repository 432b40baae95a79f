"""When parameters are gathered: compiled memory and collectives."""

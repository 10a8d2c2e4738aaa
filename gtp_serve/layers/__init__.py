"""Modules of the serving model; each states its spans."""

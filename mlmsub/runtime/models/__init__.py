"""Megatron models: their layers, their draft, and what the libraries need to build them anywhere."""

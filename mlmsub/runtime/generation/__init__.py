"""Decoding with a static key/value cache, prompts, sampling."""

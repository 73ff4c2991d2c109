"""Formats, calibration, and the checks of a quantized model."""

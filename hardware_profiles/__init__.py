"""Devices and clusters as YAML, each number with its source, and the detection of the machine at hand."""

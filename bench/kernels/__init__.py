"""Checks of the model's kernels on the GPU against float32 or float64 maths, and their times beside alternatives."""

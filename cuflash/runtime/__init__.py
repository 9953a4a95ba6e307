"""Devices, CUDA sources and libraries: what the families run on. Knows nothing of attention."""

"""Blockwise FP8 for linear layers: quantisation, GEMMs, autograd, weight gathering. Knows no training framework.

``reference`` states the numbers, every backend reproduces them, ``linear`` and ``grouped`` train with them.
"""

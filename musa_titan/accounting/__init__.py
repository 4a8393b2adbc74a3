"""What a model costs, from Megatron's arguments alone: parameters, FLOPs, static memory. Standard library only.

Everything is exact integer arithmetic on the shapes of the weights. Recipes are checked with it before a device is
touched, and the log of a training step takes its FLOPs from it.
"""

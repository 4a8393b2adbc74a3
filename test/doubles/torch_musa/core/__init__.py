"""Submodules under the names torch_musa gives them."""

"""Starts a recipe on many machines over SSH, watches it, and stops exactly what it started.

The launching machine (``launcher.py``) keeps no connection open: it visits the machines, a bounded number at a time, to
prepare, start, look and stop. On each machine a small supervisor (``agent.py``) runs the recipe and owns every process
that descends from it. Standard library only, on both ends.
"""

"""The acceptance kit, ``musa-titan verify``: turns *not run on this hardware* into a dated result.

It runs on whatever backend is present, takes minutes, and writes what it found as JSON and as a page. Each check says
passed, failed, or not here (with the reason), and the figures it measured.
"""

"""The patch engine: what a patch is, when it applies, what it reports. Knows no framework.

Read in this order: ``spec`` (a patch is data), ``boot`` (waits for imports), ``engine`` (applies), ``fingerprint`` and
``lock`` (notice that upstream moved), ``digest`` (compares ranks), ``report``.
"""

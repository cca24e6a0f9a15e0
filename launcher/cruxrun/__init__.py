"""``cruxrun``: torchrun, with the job measured and scheduled by Crux.

Importing this package costs nothing: ``import torch`` of every process on the machine loads
:mod:`cruxrun.autoload` through its entry point.
"""

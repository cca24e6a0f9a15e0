"""The version of the package; everything else reads it here."""

__version__ = "0.1.0"

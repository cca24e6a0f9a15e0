"""The commands of ``crux sim``, one a module."""

"""The commands of ``crux``: one file each."""

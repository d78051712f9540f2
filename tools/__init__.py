"""Tools for those who work on Stillroom; not part of the package."""

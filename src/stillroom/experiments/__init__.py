"""Tables of ordinary runs. The last room before the front door: it may import every other."""

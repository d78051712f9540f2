"""Behind the front door: one file a command. May use every room; no room uses it."""

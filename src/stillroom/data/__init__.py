"""Pantry: prompts and answers."""

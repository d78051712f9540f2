"""Exam hall: scores with error bars."""

"""Calibration: a teacher's distillability, turned up or down."""

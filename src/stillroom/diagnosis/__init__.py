"""Clinic: what a teacher will teach a student, and what ails a student that has been taught."""

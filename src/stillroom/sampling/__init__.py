"""Studio: the student speaks, the teacher scores."""

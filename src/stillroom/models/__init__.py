"""Library: who takes part. Loading of teacher, student and proxy; vocabularies; conversion."""

"""Rows of tables by key: out of a model, into one, and in the files of torchembed and of others."""

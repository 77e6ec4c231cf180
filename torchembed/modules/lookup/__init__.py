"""Lookups of a batch in table groups, and the stages in which they are done."""

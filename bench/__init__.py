"""Figures of speed, ours beside other libraries', each checked in the run that prints it."""

"""Other projects' dialects over the rooms below, one package for each."""

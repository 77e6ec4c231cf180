"""Results as files, and the tables that README.md shows of them."""

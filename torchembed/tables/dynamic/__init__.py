"""Dynamic tables: any 64-bit number is an id, and gets a row of a hash table in bounded memory."""

"""Stores that hold a bounded number of rows."""

from torchembed.stores import RedisStore, VolatileMemoryStore

BoundedStore = VolatileMemoryStore | RedisStore

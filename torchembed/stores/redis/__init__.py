"""A store in Redis, which several machines share."""

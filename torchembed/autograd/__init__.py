"""Memory and time of gradients: slots in flat buffers, and deferred gradients of weights."""
